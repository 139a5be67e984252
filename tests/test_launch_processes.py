"""Real ranks under the launcher: what users see when all is well, and when something dies."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(90)

WORKER = str(Path(__file__).with_name("launch_worker.py"))
HEARTBEAT_TIMEOUT = 3.0
PARENT = """
import sys
from ratrain.errors import UserError
from ratrain.runtime.launch import launch
try:
    sys.exit(launch(sys.argv[2:], int(sys.argv[1]), program=(sys.executable, {worker!r})))
except UserError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(2)
"""


class Run:
    """One launch in a process of its own."""

    def __init__(self, mode: str, nproc: int, **env: str) -> None:
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_PORT")}
        clean |= {"OMP_NUM_THREADS": "1", "RATRAIN_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT), **env}
        self.nproc = nproc
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT.format(worker=WORKER), str(nproc), mode],
            env={key: value for key, value in clean.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def workers(self) -> dict[int, psutil.Process]:
        """The ranks, once each has printed its pid."""
        assert self.process.stdout is not None
        found: dict[int, psutil.Process] = {}
        while len(found) < self.nproc:
            line = self.process.stdout.readline()
            assert line, f"ended early: {self.process.communicate()}"
            self.lines.append(line)
            if match := re.match(r"pid (\d+) (\d+)", line):
                found[int(match[1])] = psutil.Process(int(match[2]))
        return found

    def end(self) -> tuple[int, str, list[str]]:
        """Exit status, all of standard output, and the launcher's own lines of standard error."""
        out, err = self.process.communicate(timeout=60)
        self.stderr = err
        own = [line for line in err.splitlines() if line.startswith(("ratrain: ", "error: "))]
        return self.process.returncode, "".join(self.lines) + out, own


@contextmanager
def running(mode: str, nproc: int, **env: str) -> Iterator[Run]:
    run = Run(mode, nproc, **env)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def gone(processes: dict[int, psutil.Process]) -> bool:
    """Whether all end within 5 s; one that nobody has collected yet counts as ended."""
    left = psutil.wait_procs(list(processes.values()), timeout=5)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


# --- without torch


def test_launcher_imports_no_torch() -> None:
    check = "import sys, ratrain.runtime.launch; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=30)


def test_port_in_use_is_one_line_and_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        with running("forever", 2, MASTER_PORT=str(port)) as run:
            status, out, lines = run.end()
        assert status != 0 and out == "" and time.monotonic() - begun < 10
        assert len(lines) == 1 and f"port {port} is in use" in lines[0]


def test_killed_parent_leaves_no_orphan() -> None:
    with running("forever", 2) as run:
        workers = run.workers()
        run.process.kill()
        assert gone(workers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_rank_save(number: signal.Signals) -> None:
    with running("graceful", 2) as run:
        workers = run.workers()
        run.process.send_signal(number)
        status, out, lines = run.end()
        assert (status, lines) == (0, [])
        assert "saved 0" in out and "saved 1" in out
        assert gone(workers)


def test_a_second_signal_kills() -> None:
    with running("stubborn", 2) as run:
        workers = run.workers()
        run.process.terminate()
        assert run.process.stdout is not None
        heard = {run.process.stdout.readline() for _ in range(2)}
        assert heard == {"term 0\n", "term 1\n"}
        run.process.terminate()
        status, _, lines = run.end()
        assert status == 128 + signal.SIGTERM and len(lines) == 1 and "SIGTERM" in lines[0]
        assert gone(workers)


def test_a_rank_that_exits_ends_the_others_and_is_named() -> None:
    with running("exit7", 3) as run:
        workers = run.workers()
        status, _, lines = run.end()
        assert status == 7
        assert len(lines) == 1 and re.search(r"rank 1 .*exit status 7", lines[0])
        assert gone(workers)


def test_threads_are_shared_out_unless_set() -> None:
    cores = len(os.sched_getaffinity(0))
    with running("graceful", 2, OMP_NUM_THREADS="") as run:
        run.workers()
        run.process.terminate()
        assert f"threads {max(1, cores // 2)}" in run.end()[1]


# --- with torch


def test_two_runs_at_once_both_finish() -> None:
    with running("sum", 2) as one, running("sum", 2) as two:
        ends = [one.end(), two.end()]
    assert [end[0] for end in ends] == [0, 0], (one.stderr, two.stderr)
    ports = [set(re.findall(r"port (\d+)", end[1])) for end in ends]
    assert len(ports[0]) == len(ports[1]) == 1 and ports[0] != ports[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_all_end(victim: int) -> None:
    with running("loop", 2) as run:
        workers = run.workers()
        begun = time.monotonic()
        workers[victim].kill()
        status, _, lines = run.end()
        assert status != 0 and time.monotonic() - begun < 10
        assert len(lines) == 1 and re.search(rf"rank {victim} .*killed by SIGKILL", lines[0]), run.stderr
        assert gone(workers)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_all_end(victim: int) -> None:
    with running("loop", 2) as run:
        workers = run.workers()
        assert workers[1].cmdline()[0].startswith("ratrain train rank 1/2")
        begun = time.monotonic()
        workers[victim].suspend()
        status, _, lines = run.end()
        assert status != 0 and time.monotonic() - begun < HEARTBEAT_TIMEOUT + 10
        assert len(lines) == 1 and re.search(rf"rank {victim} .*has not answered for 3 s", lines[0]), (
            run.stderr
        )
        assert gone(workers)


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("one-raises", "ratrain: rank 1: no space left on /data: free 3 GB"),
        ("bug", "ratrain: rank 1: KeyError: 'embed'"),
    ],
)
def test_an_error_is_one_line(mode: str, line: str) -> None:
    with running(mode, 2) as run:
        status, out, lines = run.end()
        # Looked at afterwards: the rank that fails may be gone before its line is read.
        pids = [int(pid) for pid in re.findall(r"^pid \d (\d+)", out, re.MULTILINE)]
        assert status != 0 and len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
        assert len(lines) == 1 and line in lines[0], run.stderr
        assert ("Traceback" in run.stderr) == (mode == "bug"), run.stderr


def test_an_error_of_all_ranks_is_one_line_under_torchrun_too() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {key: value for key, value in os.environ.items() if key != "RANK"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, WORKER, "all-raise"], env=env, capture_output=True, text=True, timeout=80
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ratrain: ")]
    assert done.returncode != 0
    assert len(lines) == 1 and "corpus /nowhere is missing: give a folder" in lines[0], done.stderr
