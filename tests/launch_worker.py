"""A small worker for the launch tests: ``launch_worker.py MODE``. Not a test itself."""

import os
import signal
import sys
import threading

from ratrain.runtime.worker import die_with_parent, worker_main

RANK = int(os.environ.get("RANK", "0"))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def train(mode: str) -> int:
    """Modes that meet through torch.distributed: everyone joins an endless row of all_reduces."""

    def body(rendezvous, heartbeat) -> int:
        import torch
        import torch.distributed as dist

        from ratrain.errors import UserError

        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == rendezvous.world_size == dist.get_world_size()
        say(f"pid {rendezvous.rank} {os.getpid()} port {rendezvous.place.master_port}")
        dist.all_reduce(value)  # nobody fails before all have said theirs
        if mode == "sum":
            return 0
        if mode == "all-raise":
            raise UserError("corpus /nowhere is missing: give a folder")
        if rendezvous.rank == 1 and mode == "one-raises":
            raise UserError("no space left on /data: free 3 GB")
        if rendezvous.rank == 1 and mode == "bug":
            raise KeyError("embed")
        while True:
            dist.all_reduce(value)

    return worker_main(body)


def light(mode: str) -> int:
    """Modes without torch."""
    die_with_parent(os.environ)
    ended = threading.Event()
    if mode == "graceful":
        signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, lambda number, frame: say(f"term {RANK}"))
    say(f"pid {RANK} {os.getpid()} threads {os.environ['OMP_NUM_THREADS']}")
    if mode == "exit7" and RANK == 1:
        return 7
    while not ended.wait(0.05):
        pass
    say(f"saved {RANK}")
    return 0


if __name__ == "__main__":
    light_modes = {"graceful", "stubborn", "exit7", "forever"}
    sys.exit((light if sys.argv[1] in light_modes else train)(sys.argv[1]))
