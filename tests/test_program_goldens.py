"""A few small programs, written out. RATRAIN_REGENERATE=1 rewrites the files: read the difference."""

import os
from pathlib import Path

import pytest

from ratrain.program.layout import Layout, place
from ratrain.program.passes import PASSES, build
from ratrain.program.program import dump

GOLDENS = Path(__file__).parent / "goldens"
ALL = tuple(PASSES)


def _inputs(layout: Layout) -> Layout:
    return layout.with_(rungs=tuple(tuple("inputs" for _ in blocks) for blocks in layout.stages))


CASES = {
    "two-stages-baseline": (_inputs(Layout.even(2, 2, replicas=2, microbatches=3)), "steady", ()),
    "two-stages-all": (_inputs(Layout.even(2, 2, replicas=2, microbatches=3)), "steady", ALL),
    "two-stages-grouped": (
        _inputs(Layout.even(2, 2, replicas=2, microbatches=3, grouped=2)),
        "steady",
        ALL,
    ),
    "two-stages-first": (Layout.even(2, 2, replicas=2, microbatches=2), "first", ALL),
    "two-stages-flush": (Layout.even(2, 2, replicas=2, microbatches=2), "flush", ALL),
    "two-stages-evaluate": (Layout.even(2, 2, replicas=2, microbatches=2), "evaluate", ALL),
    "three-stages-tied-zero2": (
        Layout(place((0, 2, 0)), replicas=2, microbatches=2, zero=2, tied=True, gated=False),
        "steady",
        ALL,
    ),
    "one-stage-zero3": (Layout.even(1, 1, replicas=2, microbatches=2, zero=3), "steady", ALL),
}


@pytest.mark.parametrize("name", CASES)
def test_program_is_the_golden_one(name: str) -> None:
    text = dump(build(*CASES[name]))
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("RATRAIN_REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_without_a_case() -> None:
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(CASES)
