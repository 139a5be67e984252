"""The parent side of ``ratrain train`` on one host: starts the workers, passes on signals, names the cause.

It imports no torch and decides nothing about training. Whatever happens to it, no worker outlives it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from ratrain.errors import UserError
from ratrain.runtime.failure import ERROR_FD, FAILED, Evidence, Failure, most_causal
from ratrain.runtime.rendezvous import STORE_FD, listen
from ratrain.runtime.worker import PARENT_PID

PEER_GRACE = 3.0
"""Seconds that the other ranks have to end by themselves after one has failed."""

STOP_GRACE = 300.0
"""Seconds that all ranks have to save and end after SIGTERM or SIGINT."""

_TICK = 0.1  # seconds between two looks at the children
_RATRAIN = (sys.executable, "-m", "ratrain")


def launch(
    argv_worker: Sequence[str],
    nproc: int,
    *,
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = _RATRAIN,
) -> int:
    """Run ``program + argv_worker`` as ``nproc`` ranks on this host and wait until all have ended.

    The rendezvous port is ``master_port``, else ``MASTER_PORT`` of ``env``, else a free one. It is bound
    here, before any worker starts, and handed to rank 0 as a listening socket: runs at the same time cannot
    collide. SIGTERM or SIGINT becomes one SIGTERM to each worker, so that it saves and ends; a second one
    kills them.

    Args:
        argv_worker: arguments after ``program``, the same for every rank.
        nproc: number of ranks, at least 1.
        env: environment of the workers; this process's own by default.
        program: what to run; ``python -m ratrain`` by default.

    Returns:
        The exit status for this process: 0 if every worker ended with 0. Otherwise not 0, and one line on
        standard error has named the rank and the cause.

    Raises:
        UserError: the port cannot be bound; nothing was started.

    Call it from the main thread: it handles signals, and the workers die with the thread that started them.
    """
    base = dict(os.environ if env is None else env)
    base.pop(STORE_FD, None)  # rank 0's alone
    listener = listen("127.0.0.1", _explicit_port(master_port, base))
    reports_read, reports_write = os.pipe()
    try:
        with _recorded_signals() as signals:
            run = _Run(reports_read, signals)
            try:
                for rank in range(nproc):
                    worker_env = base | _worker_env(base, rank, nproc, listener, reports_write)
                    passed = [reports_write]
                    if rank == 0:
                        worker_env[STORE_FD] = str(listener.fileno())
                        passed.append(listener.fileno())
                    command = [*program, *argv_worker]
                    # A group of its own: Ctrl-C reaches the parent only, which passes it on once.
                    child = subprocess.Popen(
                        command,
                        env=worker_env,
                        pass_fds=passed,
                        stdin=subprocess.DEVNULL,
                        process_group=0,
                    )
                    run.children.append(child)
                # Rank 0 alone keeps the port: a client that comes after its death must be refused.
                listener.close()
                run.supervise()
            finally:
                run.kill()
        return run.conclude()
    finally:
        listener.close()
        os.close(reports_read)
        os.close(reports_write)


@dataclass
class _Run:
    """The children of one launch, and what is known of how they ended."""

    reports: int
    signals: list[int]
    children: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    failed_at: float | None = None
    stopped_at: float | None = None
    killed: bool = False
    status: int = 0

    def supervise(self) -> None:
        """Return when every child has ended, or when those that are left must be killed."""
        alive = set(range(len(self.children)))
        while alive:
            self._read_reports(_TICK)
            for rank in sorted(alive):
                if (status := self.children[rank].poll()) is not None:
                    alive.discard(rank)
                    self._record_end(rank, status)
            now = time.monotonic()
            if len(self.signals) > 1:
                return
            if self.signals and self.stopped_at is None:
                self.stopped_at = now
                for rank in alive:
                    self.children[rank].send_signal(signal.SIGTERM)
            if self.failed_at is not None and now - self.failed_at > PEER_GRACE:
                return
            if self.stopped_at is not None and now - self.stopped_at > STOP_GRACE:
                return

    def kill(self) -> None:
        """SIGKILL every child that is left, with what it started, and collect it."""
        for child in self.children:
            if child.poll() is None:
                self.killed = True
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:  # it has not reached its own group yet
                    child.kill()
        for child in self.children:
            child.wait()

    def conclude(self) -> int:
        """Name the cause on standard error and return the exit status."""
        self._read_reports(0)
        failure = most_causal(self.failures)
        stop = self.signals[0] if self.signals else None
        if stop is not None and (failure is None or failure.evidence >= Evidence.EXITED):
            if not self.killed and failure is None:
                return 0
            _say(f"stopped by {signal.Signals(stop).name} before all ranks had saved and ended")
            return 128 + stop
        if failure is None:
            return 0
        _say(str(failure))
        return self.status or 1

    def _record_end(self, rank: int, status: int) -> None:
        if status == 0:
            return
        if self.failed_at is None:
            self.failed_at = time.monotonic()
            self.status = max(status, 1)
        # A worker that ends because another failed has status FAILED: that accuses nobody.
        evidence = Evidence.LOST if status == FAILED else Evidence.EXITED
        self.failures.append(Failure(rank, _ending(status), evidence, f"pid {self.children[rank].pid}"))

    def _read_reports(self, timeout: float) -> None:
        while select.select([self.reports], [], [], timeout)[0]:
            # The parent holds the writing end too, so there is no end of file; writes are whole lines.
            for line in os.read(self.reports, 65536).splitlines():
                self.failures.append(Failure.decode(line))
            timeout = 0


def _ending(status: int) -> str:
    if status > 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def _say(line: str) -> None:
    print(f"ratrain: {line}", file=sys.stderr, flush=True)


def _explicit_port(master_port: int | None, env: Mapping[str, str]) -> int:
    """The port asked for, 0 for any. Raises UserError if MASTER_PORT is not a number."""
    if master_port is not None:
        return master_port
    text = env.get("MASTER_PORT", "0")
    if not text.isdecimal():
        raise UserError(f"MASTER_PORT is {text!r}, expected a port number: unset it to use a free port")
    return int(text)


def _worker_env(
    base: Mapping[str, str], rank: int, nproc: int, listener: socket.socket, reports: int
) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        # All ranks are here: do not depend on what this host's name resolves to.
        "GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(max(1, cores // nproc))),
        ERROR_FD: str(reports),
        PARENT_PID: str(os.getpid()),
    }


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Within the block SIGTERM and SIGINT are only appended to the list."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
