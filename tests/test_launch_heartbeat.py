"""Heartbeats between threads of one process, and the kernel's switch; no torch."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from ratrain.runtime.failure import Evidence, Failure, most_causal
from ratrain.runtime.heartbeat import Heartbeat
from ratrain.runtime.rendezvous import Place

pytestmark = pytest.mark.timeout(30)


class Store:
    """A store for threads: ``get`` waits for ``set``."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=10)
            return self.values[key]


class Ranks:
    """Heartbeats of ranks 0 to n-1, all but the absent; verdicts by rank."""

    def __init__(self, world_size: int, absent: tuple[int, ...] = (), timeout: float = 10.0) -> None:
        self.store = Store()
        self.verdicts: dict[int, queue.Queue[Failure]] = {rank: queue.Queue() for rank in range(world_size)}
        self.world_size = world_size
        self.timeout = timeout
        self.beats = {rank: self.start(rank) for rank in range(world_size) if rank not in absent}

    def place(self, rank: int) -> Place:
        return Place(rank, self.world_size, rank, "127.0.0.1", 1)

    def start(self, rank: int) -> Heartbeat:
        end: Callable[[Failure], None] = self.verdicts[rank].put
        return Heartbeat.start(
            self.place(rank), self.store, interval=0.05, timeout=self.timeout, end=end, switch=False
        )

    def connect_raw(self, rank: int) -> socket.socket:
        port, token, _ = json.loads(self.store.get("heartbeat"))
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        connection.sendall(json.dumps([token, rank, f"host h, pid {rank}"]).encode() + b"\n")
        return connection

    def verdict(self, rank: int) -> Failure:
        return self.verdicts[rank].get(timeout=10)

    def close(self) -> None:
        closing = [threading.Thread(target=beat.close) for beat in self.beats.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(10)
            assert not thread.is_alive()


def test_a_clean_end_is_not_a_death_and_rank_0_waits_for_the_last() -> None:
    ranks = Ranks(4)
    ranks.beats[2].close()
    first = threading.Thread(target=ranks.beats[0].close)
    first.start()
    first.join(0.3)
    assert first.is_alive()
    ranks.beats[1].close()
    ranks.beats[3].close()
    first.join(10)
    assert not first.is_alive()
    assert all(verdicts.empty() for verdicts in ranks.verdicts.values())


def test_a_closed_connection_is_a_death_known_to_all() -> None:
    ranks = Ranks(4, absent=(3,))
    ranks.connect_raw(3).close()
    for rank in range(3):
        verdict = ranks.verdict(rank)
        assert (verdict.rank, verdict.evidence) == (3, Evidence.GONE)
        assert "rank 3 (host h, pid 3): ended without a word" in str(verdict)


def test_silence_is_a_verdict_about_the_silent_rank_only() -> None:
    ranks = Ranks(3, absent=(2,), timeout=0.6)
    connection = ranks.connect_raw(2)
    for rank in range(2):
        verdict = ranks.verdict(rank)
        assert (verdict.rank, verdict.evidence) == (2, Evidence.SILENT)
    connection.close()


def test_a_rank_that_never_comes_is_named() -> None:
    ranks = Ranks(3, absent=(1,), timeout=0.4)
    expected = Failure(1, "has not started its heartbeat within 0.4 s", Evidence.SILENT)
    assert ranks.verdict(2) == ranks.verdict(0) == expected


def test_a_silent_or_dead_hub_is_named_by_the_others() -> None:
    for dies, evidence in ((False, Evidence.SILENT), (True, Evidence.GONE)):
        ranks = Ranks(0)
        ranks.world_size, ranks.timeout = 2, 0.4
        ranks.verdicts[1] = queue.Queue()
        with socket.create_server(("127.0.0.1", 0)) as hub:
            ranks.store.set("heartbeat", json.dumps([hub.getsockname()[1], "t", "host h, pid 7"]))
            ranks.start(1)
            connection, _ = hub.accept()
            if dies:
                connection.close()
            verdict = ranks.verdict(1)
            assert (verdict.rank, verdict.evidence, verdict.where) == (0, evidence, "host h, pid 7")
            connection.close()


@pytest.mark.parametrize("culprit", [0, 2])
def test_abort_tells_all_others_the_cause(culprit: int) -> None:
    ranks = Ranks(3)
    ranks.beats[culprit].abort("no space left on /data")
    for rank in {0, 1, 2} - {culprit}:
        assert ranks.verdict(rank) == Failure(culprit, "no space left on /data", Evidence.ERROR)
    assert ranks.verdicts[culprit].empty()


def test_strangers_at_the_port_are_ignored() -> None:
    ranks = Ranks(2)
    port = json.loads(ranks.store.get("heartbeat"))[0]
    for words in (b"GET / HTTP/1.1\n\n", b"7\n", b'["wrong", 1, "x"]\n', b'["wrong", [], "x"]\n', b""):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100).strip() == b""
    ranks.close()
    assert all(verdicts.empty() for verdicts in ranks.verdicts.values())


def test_hundreds_of_ranks_on_one_hub() -> None:
    ranks = Ranks(200, absent=(77,), timeout=20.0)
    ranks.connect_raw(77).close()
    assert {ranks.verdict(rank).rank for rank in range(200) if rank != 77} == {77}


def test_the_kernel_ends_a_stopped_process() -> None:
    script = (
        "import os, signal\n"
        "from ratrain.runtime.deadmans_switch import DeadMansSwitch\n"
        "off = DeadMansSwitch(0.2); off.disarm()\n"
        "switch = DeadMansSwitch(0.3)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=20)
    assert done.returncode == -signal.SIGKILL


def test_the_best_evidence_wins_and_among_equals_the_first() -> None:
    lost = Failure(0, "Connection closed by peer", Evidence.LOST)
    gone = Failure(2, "ended without a word", Evidence.GONE)
    killed = Failure(2, "was killed by SIGKILL", Evidence.EXITED)
    error = Failure(1, "corpus is empty", Evidence.ERROR)
    assert most_causal([]) is None
    assert most_causal([lost, gone, killed]) == killed
    assert most_causal([lost, error, Failure(3, "x", Evidence.ERROR)]) == error


def test_a_report_fits_one_atomic_write() -> None:
    failure = Failure(1, "ü" * 5000, Evidence.ERROR, "host h, pid 1")
    line = failure.encode()
    assert len(line) <= 4096 and line.count(b"\n") == 1
    assert failure.cause.startswith(Failure.decode(line).cause)
    assert os.pathconf("/", "PC_PIPE_BUF") >= 4096
