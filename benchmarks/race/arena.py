"""Runs the contenders of a row in turns: all are alive at once, one trains while the others wait.

So a drift of the machine meets all of them alike, and importing torch costs once per row. A waiting rank
blocks on its socket and burns nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import IO, Any

import cluster
from race.rows import Case, Row
from race.workload import prepare_tokens

BENCHMARKS = Path(__file__).resolve().parents[1]
WARM_STEPS = 2
_START_TIMEOUT = 420.0  # DeepSpeed compiles an extension when it is first used
_WINDOW_TIMEOUT = 600.0
_FIRST_PORT = 29600
LOOPBACK = "loopback"

Start = Callable[[int, Sequence[str], Mapping[str, str], IO[str]], "subprocess.Popen[str]"]


class Failed(RuntimeError):
    """A contender could not start or broke down; the message is its own."""


@dataclass
class Record:
    """What one contender did.

    windows   wall seconds per step of each window, slowest rank
    losses    of every step from the first, warm-up included
    processor seconds of processor time per step, busiest rank, of each window: what wall time hides on a busy machine
    peak      most bytes resident, per rank
    details   what the tool told of its last window, per rank
    """

    windows: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def race(row: Row, repeat: int, scratch: Path, tell: Callable[[str], None]) -> dict[str, Record]:
    """Runs `repeat` windows of every contender of `row`, in turns, after a short one to warm up."""
    records = {case.name: Record() for case in row.cases}
    with ExitStack() as stack:
        start = starter(row, stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        teams: dict[str, _Team] = {}
        for number, case in enumerate(row.cases):
            store = prepare_tokens(case.model, scratch)
            log = stack.enter_context((scratch / f"{row.name}.{case.name}.log").open("w"))
            team = _Team(case, start, _FIRST_PORT + number, folder / f"{number}", store, log)
            stack.callback(team.close)
            teams[case.name] = team
        for name, team in teams.items():
            _attempt(records[name], team, team.await_ready)
        step = 0
        for turn in range(repeat + 1):
            count = row.steps if turn else WARM_STEPS
            for name in list(teams):
                record, team = records[name], teams[name]
                if not record.error:
                    _attempt(record, team, partial(team.window, step, count, record))
                    tell(f"  {turn}/{repeat} {name}: {record.error or f'{record.windows[-1]:.3f} s a step'}")
                if not turn:
                    record.windows.clear()
                    record.processor.clear()
            step += count
        for name, team in teams.items():
            if not records[name].error:
                _attempt(records[name], team, partial(team.details, records[name]))
    return records


def _attempt(record: Record, team: _Team, action: Callable[[], None]) -> None:
    """A contender that fails is out, and must not burn the others' processor."""
    try:
        action()
    except Failed as error:
        record.error = str(error)
        team.close()


def starter(row: Row, stack: ExitStack) -> Start:
    """How to start a rank: here, or each on a host of its own behind a link of the row's rate."""
    if row.link == LOOPBACK:
        return _start_here
    hosts = stack.enter_context(cluster.Cluster(max(case.ranks for case in row.cases), row.link))

    def start(
        rank: int, command: Sequence[str], env: Mapping[str, str], log: IO[str]
    ) -> subprocess.Popen[str]:
        own = {k: v for k, v in env.items() if k not in hosts.environment(rank) or k == "MASTER_PORT"}
        return hosts.start(rank, command, env=own, stdout=log, stderr=log)

    return start


def _start_here(
    rank: int, command: Sequence[str], env: Mapping[str, str], log: IO[str]
) -> subprocess.Popen[str]:
    dies_with_us = ["setpriv", "--pdeathsig", "KILL", "--"]
    return subprocess.Popen(
        [*dies_with_us, *command],
        env={**os.environ, **env},
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
    )


class _Team:
    """The ranks of one contender."""

    def __init__(self, case: Case, start: Start, port: int, folder: Path, store: Path, log: IO[str]) -> None:
        self.case = case
        folder.mkdir()
        (folder / "case.json").write_text(json.dumps(case.to_json()))
        self._listener = Listener(str(folder / "socket"), family="AF_UNIX", backlog=case.ranks)
        cores = sorted(os.sched_getaffinity(0))
        self._ranks: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(case.ranks):
            arguments = [str(folder / "socket"), str(folder / "case.json"), str(store)]
            core = str(cores[case.core(rank) % len(cores)])
            command = ["taskset", "-c", core, sys.executable, "-m", "race.worker", *arguments]
            self._processes.append(start(rank, command, environment(rank, case.ranks, port), log))

    def await_ready(self) -> None:
        """Returns when every rank has built its part."""
        self._accept(time.monotonic() + _START_TIMEOUT)
        self._replies(_START_TIMEOUT)

    def window(self, first: int, count: int, record: Record) -> None:
        """All ranks train steps `first` to `first + count - 1`."""
        replies = self._ask((first, count), _WINDOW_TIMEOUT)
        took = max(r["end"] for r in replies) - min(r["start"] for r in replies)
        told = [r["losses"] for r in replies if r["losses"]]
        record.windows.append(took / count)
        record.processor.append(max(r["processor"] for r in replies) / count)
        record.losses += [sum(losses) / len(told) for losses in zip(*told)]
        record.peak = [r["peak"] for r in replies]

    def details(self, record: Record) -> None:
        """What the tool can tell of the last window."""
        record.details = self._ask(None, _WINDOW_TIMEOUT)

    def close(self) -> None:
        """Ends the ranks."""
        for process in self._processes:
            process.kill()
            process.wait()
        for connection in self._ranks:
            connection.close()
        self._listener.close()

    def _accept(self, deadline: float) -> None:
        listening: Any = self._listener._listener  # type: ignore[attr-defined]
        listening._socket.settimeout(1.0)
        arrived: dict[int, Connection[Any, Any]] = {}
        while len(arrived) < self.case.ranks:
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._processes):
                raise Failed("a rank did not start; see its log")
            try:
                connection = self._listener.accept()
            except TimeoutError:
                continue
            arrived[connection.recv()] = connection
        self._ranks = [arrived[rank] for rank in sorted(arrived)]

    def _ask(self, request: object, timeout: float) -> list[dict[str, Any]]:
        for connection in self._ranks:
            connection.send(request)
        return self._replies(timeout)

    def _replies(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < len(self._ranks):
            waiting = [c for i, c in enumerate(self._ranks) if i not in replies]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"no answer within {timeout:g} s")
            for connection in ready:
                try:
                    reply = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    raise Failed("a rank died; see its log") from None
                if "error" in reply:
                    raise Failed(reply["error"])
                replies[self._ranks.index(connection)] = reply  # type: ignore[arg-type]
        return [replies[i] for i in range(len(self._ranks))]


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As torchrun on one host, or with one rank per host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(BENCHMARKS),
    }
