"""Several hosts on one machine: network namespaces joined by a switch, each link as slow as asked for.

    python benchmarks/cluster.py --hosts 2 --rate 450mbit -- torchrun ... --node-rank {host} ...

runs the command on every host. Each host has its own network with addresses 10.77.0.1, 10.77.0.2, ... on
``eth0`` and all ports free; processors, memory and files are shared. The link between host and switch is
shaped in both directions by a token bucket (full duplex, as a cable). Needs root, Linux, and ``ip``,
``tc``, ``unshare``, ``nsenter`` and ``setpriv``.

A namespace here has no name: it exists while a process lives in it. So clusters cannot collide, and nothing
is left behind, even if this process is killed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

INTERFACE = "eth0"
MASTER_PORT = 29500  # Free on every host: each has its own ports.
_TOOLS = ("ip", "tc", "sysctl", "unshare", "nsenter", "setpriv", "taskset")
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
_SEGMENT = 65536
STEADY: Mapping[str, Any] = {"congestion": "cubic", "queue": "400ms", "unsent": 131072, "segment": 16384}
"""Settings of a `Cluster` whose links take the same time for the same transfer, for holding forecasts against: Linux's
default congestion control (BBR starves a link to probe it), queues that drop nothing, and hardly a burst."""
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ClusterUnavailable(RuntimeError):
    """This machine cannot make such a cluster; the message says why."""


def unavailable() -> str | None:
    """Why clusters cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Cluster:
    """Hosts 0 to ``hosts - 1``, from ``with`` until its end.

    Args:
        hosts: how many, 1 to 254. rate: of each host's link, each direction, as ``tc`` writes it
        (``450mbit``); None: not limited. delay: added to each packet that a host sends, as ``tc`` writes it
        (``1ms``); needs the kernel's netem. pin: run what starts on host ``i`` on core ``i`` (modulo the
        number of cores). congestion: TCP's congestion control, as ``ip route`` calls it (``cubic``); None: this
        machine's own. queue: how long a packet may wait for its link before it is dropped, as ``tc`` writes it.
        unsent: bytes that one connection may have waiting for a host's link (tcp_limit_output_bytes): with few, a
        message does not queue behind all that others have to send; None: the kernel's own. segment: bytes that pass
        a link in one piece; below the 64 KiB that kernels use, a link lets no more than one pass at once after a
        pause, where it otherwise lets 4 ms of traffic pass.

    Use it from the main thread: processes on the hosts die with the thread that started them.

    Raises:
        ClusterUnavailable: on entry, if this machine cannot do it.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = None,
        delay: str | None = None,
        pin: bool = False,
        congestion: str | None = None,
        queue: str = "50ms",
        unsent: int | None = None,
        segment: int = 65536,
    ) -> None:
        self.hosts = hosts
        self.rate = rate
        self.delay = delay
        self.pin = pin
        self.congestion = congestion
        self.queue = queue
        self.unsent = unsent
        self.segment = segment
        self._switch: _Namespace | None = None
        self._hosts: list[_Namespace] = []

    @staticmethod
    def address(host: int) -> str:
        """IPv4 address of ``host``."""
        return f"10.77.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """What a process on ``host`` is told: HOST_INDEX, HOSTS, MASTER_ADDR (host 0), MASTER_PORT and the
        interface for gloo and nccl."""
        return {
            "HOST_INDEX": str(host),
            "HOSTS": str(self.hosts),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> "subprocess.Popen[str]":
        """Start ``command`` on ``host``; ``{host}`` in an argument becomes its number.

        ``env`` is added to this process's environment and to ``environment(host)``. The process leads a group
        of its own and is killed when the cluster ends.
        """
        pin = ["taskset", "-c", str(_core(host))] if self.pin else []
        argv = [argument.replace("{host}", str(host)) for argument in command]
        return subprocess.Popen(
            [*self._hosts[host].prefix(), *pin, *argv],
            env={**os.environ, **self.environment(host), **(env or {})},
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
    ) -> list["subprocess.CompletedProcess[str]"]:
        """Run ``command`` on all hosts at once and wait; one result per host, with its output if ``capture``.

        Raises:
            subprocess.TimeoutExpired: some host took longer than ``timeout`` seconds; all have been killed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pipe = subprocess.PIPE if capture else None
        started = [self.start(host, command, env=env, stdout=pipe, stderr=pipe) for host in range(self.hosts)]
        results = []
        try:
            for process in started:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                out, err = process.communicate(timeout=left)
                results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        except BaseException:
            self._kill_processes()
            for process in started:
                process.communicate()
            raise
        return results

    def __enter__(self) -> Self:
        if (reason := unavailable()) is not None:
            raise ClusterUnavailable(reason)
        try:
            self._build()
        except BaseException:
            self._dissolve()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dissolve()

    def _build(self) -> None:
        self._switch = _Namespace()
        self._switch.ip("link add switch type bridge")
        self._switch.ip("link set switch up")
        for host in range(self.hosts):
            namespace = _Namespace()
            self._hosts.append(namespace)
            port = f"port{host}"
            self._switch.ip(f"link add {port} type veth peer name {INTERFACE} netns {namespace.pid}")
            self._switch.ip(f"link set {port} master switch up")
            namespace.ip("link set lo up")
            namespace.ip(f"addr add {self.address(host)}/24 dev {INTERFACE}")
            namespace.ip(f"link set {INTERFACE} up")
            if self.congestion is not None:
                network = (
                    f"{self.address(host).rpartition('.')[0]}.0/24 dev {INTERFACE} src {self.address(host)}"
                )
                namespace.ip(f"route replace {network} congctl {self.congestion}")
            if self.unsent is not None:
                namespace.set("net.ipv4.tcp_limit_output_bytes", self.unsent)
            for side, device in ((namespace, INTERFACE), (self._switch, port)):
                if self.segment < _SEGMENT:
                    side.ip(f"link set {device} gso_max_size {self.segment}")
                if self.rate is not None:
                    bucket = f"{_bucket(self.rate, self.segment)} latency {self.queue}"
                    side.tc(f"qdisc add dev {device} root handle 1: tbf {bucket}")
            if self.delay is not None:
                parent = "root" if self.rate is None else "parent 1:1"
                try:
                    namespace.tc(f"qdisc add dev {INTERFACE} {parent} netem delay {self.delay} limit 10000")
                except ClusterUnavailable as error:
                    raise ClusterUnavailable(f"delay needs the kernel's netem: {error}") from None

    def _kill_processes(self) -> None:
        """SIGKILL whatever runs on the hosts, also what has detached itself."""
        for namespace in self._hosts:
            for pid in namespace.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _dissolve(self) -> None:
        self._kill_processes()
        for namespace in [*self._hosts, *([self._switch] if self._switch else [])]:
            namespace.close()
        self._hosts, self._switch = [], None


class _Namespace:
    """A network namespace, kept by one sleeping process. Closing that and all others in it removes it."""

    def __init__(self) -> None:
        holder = ["unshare", "--net", "--", "sh", "-c", "echo ready; exec sleep infinity"]
        self._holder = subprocess.Popen([*_DIES_WITH_US, *holder], stdout=subprocess.PIPE, text=True)
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            self.close()
            raise ClusterUnavailable("this kernel, or container, does not allow network namespaces")

    def prefix(self) -> list[str]:
        """In front of a command: run it in here."""
        return [*_DIES_WITH_US, "nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def ip(self, arguments: str) -> None:
        """``ip ARGUMENTS`` in here. Raises ClusterUnavailable if it fails."""
        self._configure("ip", arguments)

    def tc(self, arguments: str) -> None:
        """``tc ARGUMENTS`` in here. Raises ClusterUnavailable if it fails."""
        self._configure("tc", arguments)

    def set(self, name: str, value: int) -> None:
        """A kernel setting of this network. Raises ClusterUnavailable if it fails."""
        self._configure("sysctl", f"-w {name}={value}")

    def processes(self) -> list[int]:
        """Processes in here, without the one that keeps it."""
        here = _network_of(self.pid)
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if pid != self.pid and here is not None and _network_of(pid) == here]

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()

    def _configure(self, tool: str, arguments: str) -> None:
        done = subprocess.run([*self.prefix(), tool, *arguments.split()], capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterUnavailable(f"{tool} {arguments}: {done.stderr.strip()}")


def _network_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def _core(host: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[host % len(cores)]


def _bucket(rate: str, segment: int) -> str:
    """Arguments of ``tc ... tbf``: the bucket holds 4 ms of traffic, and at least one offloaded segment; one of less
    than the usual size, and no more."""
    match = re.fullmatch(r"([\d.]+)([kmg]?bit)", rate.lower())
    if match is None:
        raise ClusterUnavailable(f"rate {rate!r} is not of the form 450mbit (units: {', '.join(_UNITS)})")
    traffic = int(float(match[1]) * _UNITS[match[2]] / 8 * 4e-3) if segment >= _SEGMENT else 0
    burst = max(segment + 2048, traffic)
    return f"rate {rate} burst {burst}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command on every host, return the first exit status that is not 0."""
    parser = argparse.ArgumentParser(description="Run a command on several hosts made of network namespaces.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of each link and direction, e.g. 450mbit")
    parser.add_argument("--delay", help="per packet sent, e.g. 1ms")
    parser.add_argument("--pin", action="store_true", help="host i on core i")
    parser.add_argument("--timeout", type=float, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="{host}: its number")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command: give it after --")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with Cluster(args.hosts, args.rate, args.delay, args.pin) as cluster:
            results = cluster.run(command, timeout=args.timeout)
    except ClusterUnavailable as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        print(f"cluster: not finished within {error.timeout:g} s", file=sys.stderr)
        return 1
    return next((result.returncode for result in results if result.returncode != 0), 0)


if __name__ == "__main__":
    sys.exit(main())
