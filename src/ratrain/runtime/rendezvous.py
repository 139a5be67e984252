"""How ranks find one another: reads what the launcher says, opens the store, starts torch.distributed.

Understands ``ratrain train`` itself, torchrun, Slurm's ``srun`` and Open MPI's ``mpirun``.
"""

import errno
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ratrain.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_FD = "RATRAIN_STORE_FD"
"""Environment variable: descriptor of the listening socket on which rank 0 serves the store."""

COLLECTIVE_TIMEOUT = 1800.0
"""Seconds before a collective gives up. Heartbeats find the dead; this must outlast the slowest step."""

_FIRST_DERIVED_PORT = 20000  # above the well-known ports and below Linux's ephemeral range from 32768
_DERIVED_PORTS = 12000


@dataclass(frozen=True)
class Place:
    """One rank's place in the run, as its launcher gave it.

    ``job`` tells apart runs that might meet at one port; empty if the launcher gives no name.
    ``agent_store``: the launcher serves the store; otherwise rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    job: str = ""
    agent_store: bool = False
    store_fd: int | None = None


@dataclass(frozen=True)
class Rendezvous:
    """This rank's place, the store that all ranks share, and the device type of the default group."""

    place: Place
    store: "Store"
    device: str

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        return self.place.local_rank


def place_from(env: Mapping[str, str]) -> Place | None:
    """The place that a launcher put into ``env``; None if this process was started by hand.

    A batch script's own shell and a Slurm or MPI job of one task count as started by hand: there
    ``ratrain train`` starts the workers.

    Raises:
        UserError: the launcher's variables are not numbers, or do not say where rank 0 is.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return Place(
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK", "0"),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(env, "MASTER_PORT"),
            job=env.get("TORCHELASTIC_RUN_ID", ""),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store_fd=_number(env, STORE_FD) if STORE_FD in env else None,
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        return _mpi_place(env)
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        return _slurm_place(env)
    return None


def connect(
    env: Mapping[str, str],
    timeout: float = 300.0,
    *,
    device: str = "cpu",
    collective_timeout: float = COLLECTIVE_TIMEOUT,
) -> Rendezvous:
    """Meet all other ranks and initialise torch.distributed's default group.

    Args:
        env: the environment that the launcher gave this process.
        timeout: seconds to wait for the other ranks.
        device: ``cpu`` (gloo) or ``cuda`` (nccl, gloo for CPU tensors; this rank's device is made current).
        collective_timeout: seconds before a collective of the default group gives up.

    Raises:
        UserError: not started by a launcher, rank 0 cannot bind the port or be reached, or some rank did not
            come within ``timeout``.
    """
    place = place_from(env)
    if place is None:
        raise UserError(
            "this process has no rank: start workers with ratrain train, torchrun, srun or mpirun"
        )
    # Bound before torch is imported: a taken port is reported in a second, and clients may already queue.
    listener = _server_socket(place)

    import torch
    import torch.distributed as dist

    try:
        server: dist.Store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            is_master=listener is not None,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except dist.DistError as error:
        raise UserError(
            f"rank 0 does not answer at {place.master_addr} port {place.master_port} ({_first_line(error)}): "
            "check MASTER_ADDR, MASTER_PORT and the firewall"
        ) from None
    # Keys of another job, or of an earlier attempt that shared the agent's store, must not be met.
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"ratrain/{place.job}/{attempt}", server)
    _await_all(place, store, timeout)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=collective_timeout),
    )
    return Rendezvous(place, store, device)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on ``port`` (0: any free one) of ``address`` (empty: all addresses).

    Raises:
        UserError: the port is in use or may not be bound.
    """
    everywhere_v6 = not address and socket.has_dualstack_ipv6()
    try:
        if everywhere_v6:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
            )
        return socket.create_server((address, port), backlog=socket.SOMAXCONN)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is in use by another process: choose another, or leave it out to get a free one"
            ) from None
        raise UserError(
            f"port {port} cannot be opened ({error}): choose another between 1024 and 65535"
        ) from None


def _await_all(place: Place, store: "Store", timeout: float) -> None:
    """Return when all ranks have come. init_process_group itself would wait for the collective time-out."""
    from torch.distributed import DistError

    store.set(f"came/{place.rank}", "")
    if store.add("count", 1) == place.world_size:
        store.set("all", "")
    try:
        store.wait(["all"], timedelta(seconds=timeout))
    except DistError:
        absent = [rank for rank in range(place.world_size) if not store.check([f"came/{rank}"])]
        named = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        raise UserError(
            f"{len(absent)} of {place.world_size} ranks did not come to {place.master_addr} port "
            f"{place.master_port} within {timeout:g} s (rank {named}): see whether they were started"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _server_socket(place: Place) -> socket.socket | None:
    """The listening socket if this rank is to serve the store."""
    if place.store_fd is not None:
        return socket.socket(fileno=place.store_fd)
    if place.rank != 0 or place.agent_store:
        return None
    return listen("", place.master_port)


def _mpi_place(env: Mapping[str, str]) -> Place | None:
    rank, world_size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    if world_size == 1:
        return None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_orte_ess_jobid") or ""
    address = env.get("MASTER_ADDR")
    if address is None:
        if _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "0") != world_size:
            raise UserError(
                "MASTER_ADDR is not set: with mpirun on several hosts give rank 0's host, "
                "as in mpirun -x MASTER_ADDR=HOST"
            )
        address = "127.0.0.1"
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        master_addr=address,
        master_port=_port(env, job),
        job=job,
    )


def _slurm_place(env: Mapping[str, str]) -> Place | None:
    in_step = "SLURM_STEP_NUM_TASKS" in env
    # The batch script itself also has a SLURM_PROCID, but no step of several tasks around it.
    if env.get("ENVIRONMENT") == "BATCH" and not in_step:
        return None
    world_size = _number(env, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS")
    if world_size == 1:
        return None
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST")
    address = env.get("MASTER_ADDR") or (first_host(hosts) if hosts else None)
    if address is None:
        raise UserError("MASTER_ADDR is not set and Slurm gives no SLURM_NODELIST: set it to rank 0's host")
    return Place(
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", "0"),
        master_addr=address,
        master_port=_port(env, job),
        job=job,
    )


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: ``cn[07-09,12]-ib,login1`` gives ``cn07-ib``."""
    entry = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodelist)
    # Within brackets the first number ends at a dash or a comma.
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[0]) if entry else nodelist


def _port(env: Mapping[str, str], job: str) -> int:
    """MASTER_PORT if given; else one that all ranks derive alike from the job's name."""
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    return _FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % _DERIVED_PORTS


def _number(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None or not text.isdecimal():
        raise UserError(f"{name} is {text!r} in the environment, expected a whole number from the launcher")
    return int(text)
