"""A profile of this machine behind a row's links, so that RATrain's planner knows what it plans for."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from race.arena import Failed, environment, starter
from race.rows import Case, Row

_PORT = 29590
_MICRO_BATCHES = (1, 2, 4)


def with_profile(row: Row, case: Case, folder: Path) -> Case:
    """The case with `options.platform` set to a profile, measured once per model and link, if its layout is left
    to the planner.

    Raises Failed if `ratrain profile` fails.
    """
    if not case.options.get("planned"):
        return case
    return replace(case, options={**case.options, "platform": str(profile_of(row, case, folder))})


def profile_of(row: Row, case: Case, folder: Path) -> Path:
    """The profile of the row's link and model with the case's ranks on their cores, measured if it is not there.

    Raises Failed if `ratrain profile` fails.
    """
    path = profile_path(row, case, folder)
    if not path.exists():
        _measure(row, case, path)
    return path


def profile_path(row: Row, case: Case, folder: Path) -> Path:
    """Where the profile of a link, a model, and ranks on cores is kept."""
    model = case.model
    shared = "" if case.ranks == 2 else f"-{case.pipeline}x{case.data}"
    return folder / f"profile-{row.link}-{model.vocab}x{model.seq_len}{shared}.json"


def _measure(row: Row, case: Case, path: Path) -> None:
    config = path.with_suffix(".model.json")
    config.write_text(json.dumps(case.model.config()))
    command = [sys.executable, "-m", "ratrain", "profile", "--model", str(config.resolve())]
    command += ["--seq-len", str(case.model.seq_len), "--out", str(path.resolve())]
    command += [f"--micro-batch={size}" for size in _MICRO_BATCHES]
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        start = starter(row, stack)
        log = stack.enter_context(path.with_suffix(".log").open("w"))
        ranks = []
        for rank in range(case.ranks):
            pinned = ["taskset", "-c", str(cores[case.core(rank) % len(cores)]), *command]
            ranks.append(start(rank, pinned, environment(rank, case.ranks, _PORT), log))
        if any([rank.wait() for rank in ranks]):
            raise Failed(f"ratrain profile failed; see {path.with_suffix('.log')}")
