"""The full matrix of "it means the same": every set of passes against none, bit by bit, and delayed runs.

    python benchmarks/equality.py [--minutes 8] [--json]

P in 1, 2, 3 x D in 1, 2, 4 x ZeRO 0 to 3 x clipping x recovery (other factors in turn, see
tests/runtime_matrix.py), each with all 8 sets of passes; then 20 seeds of random 0 to 50 ms delays in the
sequence train, eval, train with recovery. Cases come in an order that spreads over the matrix, so that what
fits into the time is a sample of all of it. Results: docs/equality.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from runtime_matrix import FACTORS, SEQUENCE, SUBSETS, configuration, full, processes
from runtime_world import ALL, Result, train

SEEDS = 20
DELAYED: dict[str, dict[str, Any]] = {
    f"{name} ZeRO-{zero}": SEQUENCE | plan | {"zero": zero, "rungs": "inputs"}
    for zero in (1, 2, 3)
    for name, plan in {
        "D=2": {"layers": (3,), "data": 2},
        "P=2 D=2": {"layers": (2, 1), "data": 2, "clip": 0.5},
    }.items()
}


def main() -> None:
    """Runs both parts and prints what was found; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time for the matrix (delays come on top)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    matrix = run_matrix(arguments.minutes * 60)
    delays = run_delays()
    result = {"matrix": matrix, "delays": delays}
    print(json.dumps(result, indent=1) if arguments.json else table(result))
    sys.exit(1 if matrix["different"] or delays["different"] else 0)


def run_matrix(seconds: float) -> dict[str, Any]:
    """Each row of the matrix under all sets of passes, until the time is up."""
    rows = list(full())
    random.Random(0).shuffle(rows)
    end = time.monotonic() + seconds
    done: list[dict[str, Any]] = []
    different: list[str] = []
    runs = 0
    for row in rows:
        if time.monotonic() > end:
            break
        none = train(**configuration(row), passes=())
        runs += 1
        for passes in SUBSETS[1:]:
            runs += 1
            found = difference(train(**configuration(row), passes=passes), none)
            if found:
                different.append(f"{row} {passes}: {found}")
        done.append(row)
    held = {name: Counter(str(row[name]) for row in done) for name in FACTORS}
    held["P x D"] = Counter(f"{len(row['layers'])} x {row['data']}" for row in done)
    return {
        "plans": len(done),
        "of": len(rows),
        "runs": runs,
        "largest world": max(processes(row) for row in done),
        "held": {name: dict(sorted(counts.items())) for name, counts in held.items()},
        "different": different,
    }


def run_delays() -> dict[str, Any]:
    """Twenty seeds of delays on each plan. Processes that wait leave cores free: both worlds run at once."""
    different: list[str] = []

    def run(size: int) -> None:
        for name, plan in DELAYED.items():
            if processes(plan) != size:
                continue
            none = train(**plan, passes=())
            for seed in range(SEEDS):
                late = train(**plan, passes=ALL, delay=0.05, delay_seed=seed)
                left = [what for rank in late.ranks for lefts in rank["leftovers"] for what in lefts]
                if found := difference(late, none) or left:
                    different.append(f"{name} seed {seed}: {found}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, {processes(plan) for plan in DELAYED.values()}))
    return {"plans": list(DELAYED), "seeds": SEEDS, "different": different}


def difference(found: Result, expected: Result) -> list[str]:
    """Names of what is not bitwise the same."""
    ours, theirs = found.meaning(), expected.meaning()
    return [name for name in theirs if ours.get(name) != theirs[name]]


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    matrix, delays = result["matrix"], result["delays"]
    lines = [
        f"matrix: {matrix['plans']} of {matrix['of']} plans x {len(SUBSETS)} sets of passes = {matrix['runs']} "
        f"runs on up to {matrix['largest world']} processes, {len(matrix['different'])} differ from none",
    ]
    for name, counts in matrix["held"].items():
        lines.append(f"  {name}: " + ", ".join(f"{value} {count}" for value, count in counts.items()))
    lines.append(
        f"delays: {len(delays['plans'])} plans x {delays['seeds']} seeds, {len(delays['different'])} differ"
    )
    return "\n".join(lines + matrix["different"] + delays["different"])


if __name__ == "__main__":
    main()
