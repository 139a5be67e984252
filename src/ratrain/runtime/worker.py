"""The child side of a run: what every rank does around training, however it was started.

Dies with its parent, carries its rank in the process title, meets the others, beats, and turns whatever goes
wrong into one line that all ranks agree on.
"""

import ctypes
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from ratrain.errors import UserError
from ratrain.runtime.failure import FAILED, Evidence, Failure, one_line, report
from ratrain.runtime.heartbeat import Heartbeat
from ratrain.runtime.rendezvous import Rendezvous, connect, place_from

PARENT_PID = "RATRAIN_PARENT_PID"
"""Environment variable: the process with which a worker must die."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_VERDICT_WAIT = (
    3.0  # s; a dead peer is named by the hub at once, but the broken connection is felt even sooner
)

# How gloo, nccl and the store say that a peer went away (texts of torch 2.13).
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket"
    r"|remote process exited|communicator was aborted",
    re.IGNORECASE,
)


def worker_main(
    body: Callable[[Rendezvous, Heartbeat], int],
    *,
    device: str = "cpu",
    debug: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``body(rendezvous, heartbeat)`` as this process's rank and return the exit status.

    ``body`` raises `UserError` for bad input; any exception ends all ranks, named by one line: printed by the
    process that started them, or, under another launcher, by this rank. A traceback is printed as well for
    errors that are not the user's, and for all with ``debug``. If another rank fails, this process ends from
    inside ``body`` (``os._exit``), also from inside a collective. Signals are the body's own affair.

    Raises:
        UserError: this process was not started as a worker.
    """
    env = os.environ if env is None else env
    die_with_parent(env)
    place = place_from(env)
    if place is None:
        raise UserError(
            "this process has no rank: start workers with ratrain train, torchrun, srun or mpirun"
        )
    set_title(place.rank, place.world_size)
    rendezvous = heartbeat = None
    try:
        rendezvous = connect(env, device=device)
        heartbeat = Heartbeat.start(place, rendezvous.store)
        status = body(rendezvous, heartbeat)
        # In this order rank 0, which serves the store, goes last.
        _destroy_groups()
        heartbeat.close()
    except Exception as error:
        lost = isinstance(error, (RuntimeError, OSError)) and _LOST_PEER.search(str(error)) is not None
        if lost and heartbeat is not None:
            heartbeat.wait_for_verdict(_VERDICT_WAIT)
        failure = Failure(place.rank, one_line(error), Evidence.LOST if lost else Evidence.ERROR)
        report(failure, env, speaks=_first_to_say(failure.cause, rendezvous))
        if heartbeat is not None:
            heartbeat.abort(failure.cause)
        if debug or not (lost or isinstance(error, UserError)):
            traceback.print_exc()
        _exit_now()
    return status


def die_with_parent(env: Mapping[str, str]) -> None:
    """Let the kernel kill this process when the parent named in ``env`` ends; nothing if none is named."""
    if PARENT_PID not in env:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(env[PARENT_PID]):  # it ended before the call
        os._exit(FAILED)


def set_title(rank: int, world_size: int, detail: str = "") -> None:
    """Show the rank in the process list: ``ratrain train rank 3/8 (stage 1, replica 1)``."""
    from setproctitle import setproctitle

    setproctitle(f"ratrain train rank {rank}/{world_size}" + (f" ({detail})" if detail else ""))


def _first_to_say(cause: str, rendezvous: Rendezvous | None) -> bool:
    """Whether no other rank has said the same: bad input is often met by all ranks at once."""
    if rendezvous is None:
        return True
    try:
        return rendezvous.store.add(f"said/{cause}", 1) == 1
    except RuntimeError:
        return True


def _destroy_groups() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _exit_now() -> NoReturn:
    """End without the interpreter's shutdown: destroying process groups may wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)
