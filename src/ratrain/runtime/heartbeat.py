"""Notices that a rank has died or stopped, and ends this process with a line that names it.

Rank 0 is the hub of a star: every other rank keeps one TCP connection to it and both sides send a beat each
second. A connection that closes without a goodbye is a death, known at once; silence beyond the time-out is
a stopped or hung process. The hub's verdict goes to all; on the hub's own silence or death every rank judges.
Collectives are not asked: a rank that waits in one for a slow peer is healthy, and beats.

A stopped process cannot end itself, so the kernel does it: `DeadMansSwitch`.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ratrain.errors import UserError
from ratrain.runtime.deadmans_switch import DeadMansSwitch
from ratrain.runtime.failure import FAILED, Evidence, Failure, report
from ratrain.runtime.rendezvous import Place, listen

INTERVAL = 1.0
"""Seconds between two beats."""

TIMEOUT = 12.0
"""Seconds of silence after which a rank counts as stopped. ``RATRAIN_HEARTBEAT_TIMEOUT`` overrides it."""

_KILL_AFTER = (
    1 / 3
)  # of the time-out: how long the verdict may travel before the kernel ends the silent process
_DELIVERY = 1.0  # seconds that a last message may take
_KEY = "heartbeat"
_TIMEOUT_VARIABLE = "RATRAIN_HEARTBEAT_TIMEOUT"


class KeyValueStore(Protocol):
    """What the ranks share at the start; torch.distributed's stores are such."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


@dataclass
class _Peer:
    """The other end of one connection. ``where`` is its host and process; ``heard`` a monotonic time in s."""

    rank: int | None
    where: str
    heard: float
    unread: bytes = b""
    left: bool = False


class Heartbeat:
    """Watches all ranks of a run from a thread; start it with ``Heartbeat.start``."""

    def __init__(self, place: Place, interval: float, timeout: float, end: Callable[[Failure], None]) -> None:
        self._place = place
        self._interval = interval
        self._timeout = timeout
        self._end = end
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._token = ""
        self._peers: dict[socket.socket, _Peer] = {}
        self._expected = set(range(1, place.world_size)) if place.rank == 0 else {0}
        self._started = time.monotonic()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._leaving: Failure | str | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._switch: DeadMansSwitch | None = None

    @classmethod
    def start(
        cls,
        place: Place,
        store: KeyValueStore,
        *,
        interval: float = INTERVAL,
        timeout: float | None = None,
        end: Callable[[Failure], None] | None = None,
        switch: bool = True,
    ) -> "Heartbeat":
        """Connect to the hub and begin to beat and to watch. All ranks call this at about the same time.

        Args:
            place: this rank's place; the hub listens on ``place.master_addr``.
            store: where rank 0 publishes the hub's port.
            interval, timeout: seconds; see ``INTERVAL`` and ``TIMEOUT``.
            end: called once, from the watching thread, when another rank has failed; by default
                `end_process`, which does not return.
            switch: let the kernel kill this process if it stops.

        Raises:
            UserError: ``RATRAIN_HEARTBEAT_TIMEOUT`` is not a number of seconds.
        """
        if timeout is None:
            timeout = _timeout_from(os.environ)
        heartbeat = cls(place, interval, timeout, end or (lambda failure: end_process(failure, place)))
        if place.rank == 0:
            heartbeat._open_hub(store)
        else:
            heartbeat._join_hub(store)
        if switch:
            heartbeat._switch = DeadMansSwitch(timeout * (1 + _KILL_AFTER))
        heartbeat._thread.start()
        return heartbeat

    def close(self) -> None:
        """Say goodbye: this rank ends as it should. Rank 0 returns when all other ranks have said so too."""
        self._leave("bye")

    def abort(self, cause: str) -> None:
        """Make all other ranks end with ``cause`` (one line) as this rank's fatal error; then return."""
        self._leave(Failure(self._place.rank, cause, Evidence.ERROR))

    def wait_for_verdict(self, seconds: float) -> None:
        """Give the watching thread time to end this process because of another rank."""
        self._thread.join(seconds)

    # --- the watching thread

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._wake_read:
                    self._wake_read.recv(64)
                elif connection is self._listener:
                    self._accept(connection)
                else:
                    failure = self._receive(connection)
                    if failure is not None:
                        return self._conclude(failure)
            if self._may_leave():
                return self._farewell()
            # Judged only after all that had arrived was read: a late watcher must not blame the others.
            if (failure := self._silent()) is not None:
                return self._conclude(failure)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._interval
                self._send_all(b"\n")
                if self._switch is not None:
                    self._switch.rearm()

    def _receive(self, connection: socket.socket) -> Failure | None:
        """Take in what came over ``connection``; the failure that follows from it, if any."""
        peer = self._peers[connection]
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in filter(None, lines):
            if peer.rank is None:
                if not self._greet(peer, line):
                    self._drop(connection)
                    return None
            elif line == b"bye":
                peer.left = True
                self._expected.discard(peer.rank)
            else:
                return Failure.decode(line)
        if data:
            return None
        self._drop(connection)
        if peer.rank is None or peer.left:
            return None
        cause = "ended without a word (killed, or crashed)"
        return Failure(peer.rank, cause, Evidence.GONE, peer.where)

    def _silent(self) -> Failure | None:
        """The rank from which nothing came for too long, if any."""
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.rank is not None and not peer.left and now - peer.heard > self._timeout:
                cause = f"has not answered for {self._timeout:g} s (stopped, or hung)"
                return Failure(peer.rank, cause, Evidence.SILENT, peer.where)
        if now - self._started > self._timeout:
            connected = {peer.rank for peer in self._peers.values()}
            for rank in self._expected - connected:
                cause = f"has not started its heartbeat within {self._timeout:g} s"
                return Failure(rank, cause, Evidence.SILENT)
        return None

    def _conclude(self, failure: Failure) -> None:
        """Another rank has failed: make sure that all know it, and end."""
        if isinstance(self._leaving, Failure):
            failure = self._leaving  # this rank's own error came at the same time, and it reports that itself
            return self._farewell()
        if self._place.rank == 0:
            self._say_last(failure.encode())
        return self._end(failure)

    def _may_leave(self) -> bool:
        if isinstance(self._leaving, Failure):
            return True
        return self._leaving is not None and (self._place.rank != 0 or not self._expected)

    def _farewell(self) -> None:
        self._say_last(self._leaving.encode() if isinstance(self._leaving, Failure) else b"bye\n")

    # --- connections

    def _open_hub(self, store: KeyValueStore) -> None:
        local = self._place.master_addr == "127.0.0.1"
        self._listener = listen("127.0.0.1" if local else "", 0)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Strangers may knock at an open port; who knows the token has read the store.
        self._token = secrets.token_hex(8)
        where = _own_where()
        store.set(_KEY, json.dumps([self._listener.getsockname()[1], self._token, where]))

    def _join_hub(self, store: KeyValueStore) -> None:
        port, token, where = json.loads(store.get(_KEY))
        connection = socket.create_connection((self._place.master_addr, port), timeout=self._timeout)
        connection.sendall(json.dumps([token, self._place.rank, _own_where()]).encode() + b"\n")
        self._add(connection, _Peer(0, where, time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        self._add(connection, _Peer(None, "", time.monotonic()))

    def _greet(self, peer: _Peer, line: bytes) -> bool:
        """Whether ``line`` is the hello of a rank of this run."""
        try:
            token, rank, where = json.loads(line)
        except (ValueError, TypeError):
            return False
        if token != self._token or not isinstance(rank, int) or rank not in self._expected:
            return False
        peer.rank, peer.where = rank, where
        return True

    def _add(self, connection: socket.socket, peer: _Peer) -> None:
        connection.setblocking(False)
        self._peers[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._peers[connection]

    def _send_all(self, line: bytes) -> None:
        for connection in self._peers:
            # A full buffer or a dead peer: reading from it tells which.
            with suppress(OSError):
                connection.send(line)

    def _say_last(self, line: bytes) -> None:
        """Send ``line`` to all and close. Waits until they have closed too, or for the delivery time.

        Closing a connection with unread beats in it would let the kernel reset it, and lose the line.
        """
        self._send_all(line)
        for connection in self._peers:
            with suppress(OSError):  # the peer may have closed it
                connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _DELIVERY
        while self._peers and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                ready = key.fileobj
                if not isinstance(ready, socket.socket) or ready not in self._peers:
                    self._selector.unregister(ready)
                    continue
                try:
                    ended = not ready.recv(65536)
                except OSError:
                    ended = True
                if ended:
                    self._drop(ready)
        for connection in list(self._peers):
            self._drop(connection)
        if self._listener is not None:
            self._listener.close()

    def _leave(self, last: Failure | str) -> None:
        self._leaving = last
        self._wake_write.send(b"x")
        self._thread.join()
        if self._switch is not None:
            self._switch.disarm()


def end_process(failure: Failure, place: Place) -> None:
    """Report ``failure`` of another rank and exit at once, whatever the other threads are waiting in.

    Outside a launcher that listens, one rank per host prints the line: the first that is not the failed one.
    """
    culprit_speaks_here = failure.evidence == Evidence.ERROR
    first = 1 if failure.rank == place.rank - place.local_rank else 0
    report(failure, os.environ, speaks=not culprit_speaks_here and place.local_rank == first)
    # In a thread: a stream whose lock the stuck main thread holds must not keep this process alive.
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(FAILED)


def _timeout_from(env: Mapping[str, str]) -> float:
    text = env.get(_TIMEOUT_VARIABLE, str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > INTERVAL:
        raise UserError(f"{_TIMEOUT_VARIABLE} is {text!r}, expected seconds, more than {INTERVAL:g}")
    return seconds


def _own_where() -> str:
    return f"host {os.uname().nodename}, pid {os.getpid()}"
