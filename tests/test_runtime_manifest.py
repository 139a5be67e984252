"""Which checkpoints stay when a new one is whole."""

from pathlib import Path

import pytest

from ratrain.runtime.manifest import MANIFEST, PARTIAL, complete, publish


def made(folder: Path, step: int, suffix: str = "") -> Path:
    path = folder / f"step-{step:08d}{suffix}"
    path.mkdir()
    (path / MANIFEST).write_text(f"{step}{suffix}")
    return path


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete(folder)]


@pytest.mark.parametrize(
    ("there", "new", "keep", "stay"),
    [
        ([2, 4], 6, 2, [4, 6]),
        ([], 2, 1, [2]),
        ([4, 6], 2, 2, [2]),  # a run that was started again from the beginning
        ([2, 4, 6, 8], 5, 2, [4, 5]),  # one that went back to step 4
    ],
)
def test_the_newest_of_this_run_stay(
    tmp_path: Path, there: list[int], new: int, keep: int, stay: list[int]
) -> None:
    for step in there:
        made(tmp_path, step)
    publish(made(tmp_path, new, PARTIAL), tmp_path / f"step-{new:08d}", keep)
    assert steps(tmp_path) == stay


def test_the_same_step_again_replaces_the_old(tmp_path: Path) -> None:
    made(tmp_path, 4)
    publish(made(tmp_path, 4, PARTIAL), tmp_path / "step-00000004", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
    assert (tmp_path / "step-00000004" / MANIFEST).read_text() == f"4{PARTIAL}"
