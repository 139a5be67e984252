"""Predicts measured A100 iterations: fits eight constants to one folder of runs, tests them on another.

    python benchmarks/a100.py [--fit FOLDER] [--test FOLDER] [--json]

A folder holds single.csv (one node) and multi.csv (several). What is fitted: four constants of compute
(matmul rate, memory bandwidth, launch time, optimizer rate) and two of each link (latency, bandwidth).
Cross-validation on the fit folder and the trivial model (one FLOP rate and the 1F1B bubble, fitted to each
file by itself) stand beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_gpt import Iterations, Run, read_runs, trivial_amounts
from ratrain.errors import UserError
from ratrain.machine.platform import OperatorModel, Platform, load_platform
from robust_fit import Vector, fit_positive

DATA = Path(__file__).parent / "data" / "a100_iterations"
FILES = ("single", "multi")
PUBLISHED = {"single": 8.37, "multi": 14.73}
FOLDS = 5
SEEDS = (0, 1, 2)
# Weight of the multi-node rows as a whole, against 1 for the single-node rows: they are few, and span more.
MULTI_WEIGHT = 1 / 3

# Constant -> start, lower and upper bound. The upper bounds of rates are the data sheets'.
CONSTANTS: dict[str, tuple[float, float, float]] = {
    "matmul fp16 (TFLOP/s)": (200, 50, 312),
    "memory (GB/s)": (1500, 300, 2039),
    "layer pass launch (us)": (700, 10, 10_000),
    "optimizer (million parameters/s)": (50_000, 1_000, 127_000),
    "within node: latency (us)": (10, 0.5, 200),
    "within node: bandwidth of a link (GB/s)": (20, 2.5, 25),
    "between nodes: latency (us)": (10, 0.5, 200),
    "between nodes: bandwidth of a link (GB/s)": (10, 1, 12.5),
}


@dataclass(frozen=True)
class Fold:
    """Rows to fit to and rows to predict, as masks."""

    fit: NDArray[np.bool_]
    test: NDArray[np.bool_]


class Rows:
    """The runs of one folder, both files in one sequence."""

    def __init__(self, folder: Path, platform: Platform) -> None:
        files = {name: read_runs(folder / f"{name}.csv") for name in FILES}
        self.runs: list[Run] = [run for name in FILES for run in files[name]]
        self.is_multi = np.array([name == "multi" for name in FILES for _ in files[name]])
        self.platform = platform

    def select(self, mask: NDArray[np.bool_]) -> Iterations:
        """The amounts of some rows."""
        return Iterations([run for run, chosen in zip(self.runs, mask) if chosen], self.platform)

    def everything(self) -> NDArray[np.bool_]:
        """The mask of all rows."""
        return np.ones(len(self.runs), dtype=bool)


def with_constants(platform: Platform, constants: Vector) -> Platform:
    """`platform` with its fitted constants replaced, in the order of CONSTANTS."""
    matmul, memory, launch, optimizer, within_us, within_gb, between_us, between_gb = (
        float(c) for c in constants
    )
    parameters = dict(platform.device.operator_model.parameters)
    parameters |= {"memory_gb_per_s": memory, "layer_pass_launch_us": launch}
    device = replace(
        platform.device,
        rates={"matmul": {"fp16": matmul * 1e12}},
        optimizer_rate=optimizer * 1e6,
        operator_model=OperatorModel(platform.device.operator_model.name, parameters),
    )
    within = replace(platform.link("within_node"), latency=within_us * 1e-6, bandwidth=within_gb * 1e9)
    between = replace(platform.between_nodes, latency=between_us * 1e-6, bandwidth=between_gb * 1e9)
    return replace(platform, device=device, within_node=within, between_nodes=between)


def fit(rows: Rows, mask: NDArray[np.bool_]) -> Vector:
    """The constants that describe the masked rows best."""
    iterations = rows.select(mask)
    multi = rows.is_multi[mask]
    weights = np.where(multi, MULTI_WEIGHT / max(multi.sum(), 1), 1 / max((~multi).sum(), 1))
    start, lower, upper = (np.array(column, dtype=float) for column in zip(*CONSTANTS.values()))
    target = np.log(iterations.measured)
    return fit_positive(
        lambda c: np.log(iterations.seconds(with_constants(rows.platform, c))) - target,
        start,
        lower,
        upper,
        weights,
    )


def errors(rows: Rows, mask: NDArray[np.bool_], constants: Vector) -> Vector:
    """Relative error of each masked row: predicted / measured - 1."""
    iterations = rows.select(mask)
    return iterations.seconds(with_constants(rows.platform, constants)) / iterations.measured - 1


def trivial_errors(fit_rows: Rows, rows: Rows) -> Vector:
    """Relative errors of the trivial model, its rate the median over the fit rows of the same file."""
    result = np.empty(len(rows.runs))
    for multi in (False, True):
        fitted = [run for run, m in zip(fit_rows.runs, fit_rows.is_multi) if m == multi]
        tested = [run for run, m in zip(rows.runs, rows.is_multi) if m == multi]
        rate = np.median(trivial_amounts(fitted) / [run.seconds for run in fitted])
        result[rows.is_multi == multi] = trivial_amounts(tested) / rate / [run.seconds for run in tested] - 1
    return result


def mape(error: Vector, is_multi: NDArray[np.bool_]) -> dict[str, float]:
    """Mean absolute percentage error by file."""
    return {
        name: float(100 * np.abs(error[is_multi == (name == "multi")]).mean())
        for name in FILES
        if (is_multi == (name == "multi")).any()
    }


def random_folds(count: int, seed: int) -> Iterator[Fold]:
    """Each row is predicted once, from a fit to the other four fifths."""
    fold = np.random.default_rng(seed).permutation(count) % FOLDS
    for k in range(FOLDS):
        yield Fold(fold != k, fold == k)


def hidden_size_folds(runs: Sequence[Run]) -> Iterator[Fold]:
    """Each model size is predicted from the other sizes: extrapolation."""
    hidden = np.array([run.hidden for run in runs])
    for size in np.unique(hidden):
        yield Fold(hidden != size, hidden == size)


def cross_validate(rows: Rows, folds: Iterator[Fold]) -> dict[str, float]:
    """Error of rows that the constants were not fitted to."""
    error = np.empty(len(rows.runs))
    for fold in folds:
        error[fold.test] = errors(rows, fold.test, fit(rows, fold.fit))
    return mape(error, rows.is_multi)


def evaluate(fit_folder: Path, test_folder: Path) -> dict[str, object]:
    """Everything that is printed, as plain values; errors in percent."""
    platform = load_platform("a100-8x")
    fit_rows, test_rows = Rows(fit_folder, platform), Rows(test_folder, platform)
    constants = fit(fit_rows, fit_rows.everything())
    error = errors(test_rows, test_rows.everything(), constants)
    worst = sorted(range(len(error)), key=lambda i: -abs(error[i]))[:5]
    shipped = test_rows.select(test_rows.everything())
    return {
        "fit": {"folder": str(fit_folder), "rows": len(fit_rows.runs)},
        "test": {
            "folder": str(test_folder),
            "rows": {name: int((test_rows.is_multi == (name == "multi")).sum()) for name in FILES},
            "fitted_to": fit_folder.resolve() == test_folder.resolve(),
        },
        "constants": dict(zip(CONSTANTS, (float(c) for c in constants))),
        "mape_percent": {
            "test rows": mape(error, test_rows.is_multi),
            "test rows, platform file a100-8x": mape(
                shipped.seconds(platform) / shipped.measured - 1, test_rows.is_multi
            ),
            "test rows, trivial model": mape(trivial_errors(fit_rows, test_rows), test_rows.is_multi),
            "vTrain, published, its whole set": PUBLISHED,
            **{
                f"fit rows, {FOLDS}-fold, seed {seed}": cross_validate(
                    fit_rows, random_folds(len(fit_rows.runs), seed)
                )
                for seed in SEEDS
            },
            "fit rows, each hidden size from the others": cross_validate(
                fit_rows, hidden_size_folds(fit_rows.runs)
            ),
        },
        "worst": [
            {
                "run": vars(test_rows.runs[i]),
                "error_percent": float(100 * error[i]),
            }
            for i in worst
        ],
    }


def show(result: dict[str, object]) -> None:
    """Prints the result as text."""
    test, constants, table = result["test"], result["constants"], result["mape_percent"]
    assert isinstance(test, dict) and isinstance(constants, dict) and isinstance(table, dict)
    note = (
        "the same rows: see the cross-validation for rows not fitted to"
        if test["fitted_to"]
        else "other rows"
    )
    print(f"fit {result['fit']}\ntest {test['folder']} {test['rows']} ({note})\n\nfitted constants")
    for name, value in constants.items():
        bound = " (at its bound)" if value > 0.999 * CONSTANTS[name][2] else ""
        print(f"  {name:<44} {value:>10.4g}{bound}")
    print(f"\n{'mean absolute percentage error':<46} {'single':>8} {'multi':>8}")
    for name, by_file in table.items():
        print(f"{name:<46} " + " ".join(f"{by_file.get(file, float('nan')):>8.2f}" for file in FILES))
    print("\nfurthest off")
    assert isinstance(result["worst"], list)
    for entry in result["worst"]:
        run = entry["run"]
        print(
            f"  {entry['error_percent']:+6.1f} %  hidden {run['hidden']} layers {run['layers']} "
            f"t{run['tensor']} d{run['data']} p{run['pipeline']} micro-batch {run['micro_batch']} "
            f"of {run['global_batch']}: measured {run['seconds']:.3f} s"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", type=Path, default=DATA, metavar="FOLDER")
    parser.add_argument("--test", type=Path, default=None, metavar="FOLDER", help="default: the fit folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        result = evaluate(options.fit, options.test or options.fit)
    except UserError as error:
        print(f"a100: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
