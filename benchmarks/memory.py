"""How right the memory forecast is on this machine: peaks of real runs beside what their plans told.

    python benchmarks/memory.py [--steps 20] [--only TEXT] [--json FILE]

Trains the configurations of forecast.py, each by `ratrain train` in fresh processes, and compares every rank's most
resident bytes (VmHWM) with its plan's forecast.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forecast import CASES, Case, configuration, prepare
from ratrain.config import to_toml


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for case in (case for case in CASES if args.only in case.name):
            rows += measure(case, folder, args.steps)
            told = ", ".join(f"{row['measured'] / 1e6:.0f} MB" for row in rows[-2:])
            print(f"{case.name}: {told}", file=sys.stderr, flush=True)
    report(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def measure(case: Case, folder: Path, steps: int) -> list[dict[str, Any]]:
    """A row for each rank of a case."""
    from ratrain.report.run_folder import read_run

    config = configuration(case, folder, "local")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    file, out = folder / "run.toml", folder / "run"
    file.write_text(to_toml(config))
    command = [sys.executable, "-m", "ratrain", "train", str(file), "--out", str(out), "--resume", "never"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = read_run(out)
    return [
        {"case": case.name, "rank": place.rank, "measured": peak, "forecast": forecast}
        for place, peak, forecast in zip(run.places, run.peaks, run.forecast_peaks)
    ]


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The table, and mean and worst errors."""
    from ratrain.report.table import render_table

    errors = [row["forecast"] / row["measured"] - 1 for row in rows]
    table = [
        (
            row["case"],
            str(row["rank"]),
            f"{row['forecast'] / 1e6:.0f}",
            f"{row['measured'] / 1e6:.0f}",
            f"{error:+.1%}",
        )
        for row, error in zip(rows, errors)
    ]
    print(render_table(("case", "rank", "forecast MB", "measured MB", "error"), table))
    mean = sum(map(abs, errors)) / len(errors)
    print(f"mean error {mean:.1%}, worst {max(errors, key=abs):+.1%}, over {len(errors)} ranks")


if __name__ == "__main__":
    main()
