"""The GPU operator model on measured A100 iterations, and the benchmark's command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
DATA = BENCHMARKS / "data" / "a100_iterations"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "a100.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The rows dealt out to two folders."""
    folders = tmp_path_factory.mktemp("even"), tmp_path_factory.mktemp("odd")
    for name in ("single.csv", "multi.csv"):
        header, *rows = (DATA / name).read_text().splitlines()
        for offset, folder in enumerate(folders):
            (folder / name).write_text("\n".join([header, *rows[offset::2]]) + "\n")
    return folders


def test_rows_not_fitted_to_are_predicted_better_than_published(halves: tuple[Path, Path]) -> None:
    for fit, test in (halves, halves[::-1]):
        done = run("--fit", str(fit), "--test", str(test), "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert not result["test"]["fitted_to"]
        error = result["mape_percent"]["test rows"]
        assert error["single"] < 8.37
        assert error["multi"] < 14.73
        assert error["single"] < result["mape_percent"]["test rows, trivial model"]["single"] / 5


def test_the_shipped_platform_file_holds_what_the_fit_gives() -> None:
    result = json.loads(run("--json").stdout)["mape_percent"]
    for name, error in result["test rows"].items():
        assert result["test rows, platform file a100-8x"][name] == pytest.approx(error, abs=0.1)


def test_a_folder_without_the_files_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run("--fit", str(tmp_path))
    assert done.returncode != 0
    assert "single.csv" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    shutil.copy(DATA / "single.csv", tmp_path)
    (tmp_path / "multi.csv").write_text("# GPUs,global batch\n64,512\n")
    assert "column 'micro batch' is missing" in run("--fit", str(tmp_path)).stderr
