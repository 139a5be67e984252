"""One rank of one contender: builds it, then trains windows of steps when the arena says so.

python -m race.worker SOCKET CASE.json STORE      (rank and address in the environment, as torchrun sets them)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from race.rows import RATRAIN, Case


def main(socket: str, case_file: str, store: str) -> None:
    """Serve the arena at `socket` until it hangs up."""
    rank = int(os.environ["RANK"])
    arena = Client(socket, family="AF_UNIX")
    arena.send(rank)
    try:
        _serve(arena, Case.from_json(json.loads(Path(case_file).read_text())), rank, Path(store))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        told = str(error).strip().partition("\n")[0]
        arena.send({"error": f"{type(error).__name__}: {told[:300]}"})
    # Destroying process groups may wait for peers; nothing is left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(arena: Connection[Any, Any], case: Case, rank: int, store: Path) -> None:
    import torch
    import torch.distributed as dist

    from race.contender import maker

    torch.set_num_threads(1)
    _meet(case.tool)
    contender = maker(case.tool)(case, rank, store)
    gc.collect()
    _forget_peak()
    arena.send({"ready": rank})
    while True:
        request = arena.recv()
        if request is None:
            arena.send(contender.details())
            continue
        dist.barrier()
        burnt, start = time.process_time(), time.perf_counter()
        losses = contender.train(*request)
        end, burnt = time.perf_counter(), time.process_time() - burnt
        arena.send({"start": start, "end": end, "processor": burnt, "losses": losses, "peak": _peak()})


def _meet(tool: str) -> None:
    """The default process group; RATrain's with its heartbeat, as in a real run."""
    if tool == RATRAIN:
        from ratrain.runtime.heartbeat import Heartbeat
        from ratrain.runtime.rendezvous import connect

        rendezvous = connect(os.environ)
        Heartbeat.start(rendezvous.place, rendezvous.store)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")


def _forget_peak() -> None:
    """Peaks from now on: building a model is not training it (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Most bytes resident since `_forget_peak`."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
