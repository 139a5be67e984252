"""Worlds of real processes that run many training configurations one after another.

Importing torch and transformers costs seconds a process, so one fork server imports them once and a world of
each size, once made, stays until the tests end. What a world does with a job is `runtime_jobs.py`; nothing
here imports torch.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

import runtime_jobs
from ratrain.model.tensor_slice import cut_dimension, tensor_slice
from ratrain.program.layout import Layout
from ratrain.program.passes import PASSES

ALL = tuple(PASSES)
Array = NDArray[Any]

_TIMEOUT = 180.0  # s for one job: far beyond any
_LAST_WORDS = 10.0  # s that the other ranks have to answer once one has failed
_PRELOADED = (
    "ratrain.runtime.trainer",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)


class Refused(Exception):
    """A job ended with a `UserError`: `causes[rank]` is its line, None where another error came first."""

    def __init__(self, causes: Sequence[str | None]) -> None:
        super().__init__(next(cause for cause in causes if cause))
        self.causes = tuple(causes)


@dataclass(frozen=True)
class Result:
    """What the ranks of one run saw, `ranks[i]` being what `runtime_jobs.train` returned on rank i."""

    config: Mapping[str, Any]
    ranks: tuple[dict[str, Any], ...]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The updates as rank 0 wrote them."""
        return self.ranks[0]["metrics"]

    @property
    def losses(self) -> list[float]:
        return [m["loss"] for m in self.metrics]

    @property
    def norms(self) -> list[float]:
        return [m["grad_norm"] for m in self.metrics]

    @property
    def evaluations(self) -> list[float]:
        return [e["eval_loss"] for e in self.ranks[0]["evaluations"]]

    @cached_property
    def weights(self) -> dict[str, Array]:
        """Master weights after the last step, flat, put together from all shards."""
        return self._joined("weight")

    @cached_property
    def gradients(self) -> dict[str, Array]:
        """Gradients of the first update before clipping, flat."""
        return self._joined("gradient")

    @cached_property
    def state(self) -> dict[str, Array]:
        """Weights and both moments by `kind/name`."""
        kinds = ("weight", "m", "v")
        return {f"{kind}/{name}": a for kind in kinds for name, a in self._joined(kind).items()}

    def microbatches(self, number: int, what: str, stage: int, train: bool = True) -> list[Any]:
        """`losses` or `sample_ids` of every micro-batch of a step in global order, as `stage` saw them; of an
        evaluation's batch as often as it was evaluated."""
        replicas = [
            [
                s[what]
                for s in r["steps"]
                if (s["number"], s["train"]) == (number, train) and s["form"] != "flush"
            ]
            for r in self.ranks
            if r["stage"] == stage
        ]
        return [seen[j] for turns in zip(*replicas, strict=True) for seen in turns for j in sorted(seen)]

    def meaning(self) -> dict[str, Any]:
        """All that must not depend on when things happen, in exact form."""
        return {
            "losses": self.losses,
            "norms": self.norms,
            "evaluations": self.evaluations,
            "skipped": [m["skipped"] for m in self.metrics],
            "lr": [m["lr"] for m in self.metrics],
            **{name: array.tobytes() for name, array in self.state.items()},
            **{f"gradient/{name}": array.tobytes() for name, array in self.gradients.items()},
            "views": [rank["views"] for rank in self.ranks],
        }

    def _joined(self, kind: str) -> dict[str, Array]:
        tensor = self.config["tensor"]
        stretches: dict[str, list[dict[int, Array]]] = {}
        for rank in self.ranks:
            for name, offset, array in rank["pieces"][kind]:
                parts = stretches.setdefault(name, [{} for _ in range(tensor)])
                # Copies of one stretch (replicas of ZeRO-0, a tied matrix's two stages, what tensor ranks do not
                # cut) never differ.
                mine = parts[rank["part"] if cut_dimension(name) is not None else 0]
                assert offset not in mine or mine[offset].tobytes() == array.tobytes(), f"{name} differs"
                mine[offset] = array
        flat = {
            n: [np.concatenate([s[at] for at in sorted(s)]) for s in parts if s]
            for n, parts in sorted(stretches.items())
        }
        return {n: parts[0] if len(parts) == 1 else self._whole(n, parts) for n, parts in flat.items()}

    def _whole(self, name: str, parts: Sequence[Array]) -> Array:
        """A parameter from its tensor ranks' parts, flat."""
        spec, dimension = runtime_jobs.spec_of(dict(self.config)), cut_dimension(name)
        assert dimension is not None
        shape = tensor_slice(spec, len(parts)).all_parameters()[name].shape
        joined = np.concatenate([part.reshape(shape) for part in parts], axis=dimension)
        size = spec.all_parameters()[name].shape[dimension]
        return np.take(joined, range(size), axis=dimension).reshape(-1)


def train(**config: Any) -> Result:
    """Runs a configuration (see `runtime_jobs.DEFAULTS`) in a world of the size that it needs.

    Raises:
        Refused: some rank ended with a UserError.
    """
    full = runtime_jobs.DEFAULTS | config
    size = len(full["layers"]) * full["data"] * full["tensor"]
    return Result(full, tuple(world(size).do("runtime_jobs:train", full)))


def plain(**config: Any) -> dict[str, Any]:
    """The same training by one plain process; see `runtime_plain.plain`."""
    return world(1).do("runtime_plain:plain", runtime_jobs.DEFAULTS | config)[0]


def call(name: str, **arguments: Any) -> Any:
    """What `name` (module:function) makes of `arguments` in a process that has torch loaded."""
    return world(1).do(name, arguments)[0]


def layout(config: Mapping[str, Any]) -> Layout:
    """The layout of a configuration."""
    return runtime_jobs.layout_of(runtime_jobs.DEFAULTS | config)


class World:
    """`size` processes joined by torch.distributed. The first failure ends it."""

    def __init__(self, size: int) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        context = get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        self.connections: list[Connection] = []
        self.processes = []
        port = 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=runtime_jobs.serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
            if rank == 0:
                port = ours.recv()

    def do(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Every rank's answer. Raises Refused, or AssertionError with the traceback of the rank that failed."""
        for connection in self.connections:
            connection.send((name, arguments))
        answers: dict[int, tuple[str, Any]] = {}
        limit = _TIMEOUT
        while len(answers) < len(self.connections):
            waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            ready = wait(list(waiting), limit)
            if not ready:
                break
            for connection in ready:
                try:
                    answers[waiting[connection]] = connection.recv()  # type: ignore[index,union-attr]
                except EOFError:
                    answers[waiting[connection]] = ("error", "the process ended")  # type: ignore[index]
            if any(status != "done" for status, _ in answers.values()):
                limit = _LAST_WORDS
        statuses = [answers.get(rank, ("silent", None)) for rank in range(len(self.connections))]
        if all(status == "done" for status, _ in statuses):
            return [value for _, value in statuses]
        self.end()
        refusals = [value if status == "refused" else None for status, value in statuses]
        if any(refusals):
            raise Refused(refusals)
        told = "\n".join(f"rank {rank} {status}: {value}" for rank, (status, value) in enumerate(statuses))
        raise AssertionError(f"{name} {dict(arguments)}\n{told}")

    def end(self) -> None:
        """Kills the processes; the next job of this size gets new ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        _worlds.pop(len(self.processes), None)


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """The world of this size, made at its first job."""
    if size not in _worlds:
        _worlds[size] = World(size)
    return _worlds[size]


@atexit.register
def _end_all() -> None:
    for made in list(_worlds.values()):
        made.end()
