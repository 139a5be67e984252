"""Measures this machine: block times, optimizer rate, base memory, links. Imports torch when called.

All configurations are run once a round and rounds repeat, so that a machine that drifts drifts for all
alike; a result is the median over rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.machine.measure_links import measure_interference, measure_links
from ratrain.machine.profile import BlockTime, Origin, Profile

if TYPE_CHECKING:
    import torch

    from ratrain.data.sampler import Sampler
    from ratrain.model.blocks import Block
    from ratrain.model.spec import ModelSpec, Rung

_SHARD, _SHARDS = 2_000_000, 8
"""Parameters of a shard, and how many are updated in turn."""
_CHAIN_BYTES, _MOST_LAYERS = 256_000_000, 8
"""How much the layers of a chain may take, in which blocks are timed, and how many they are at most."""
_BASE_PROBE = (
    "import psutil, torch, torch.distributed.checkpoint, transformers.models.llama.modeling_llama; "
    "import ratrain.runtime.work, ratrain.report.recorder; "
    "a = torch.ones(256, 256, requires_grad=True); (a @ a).relu().sum().backward(); "
    "print(psutil.Process().memory_info().rss)"
)


def measure_machine(
    models: Mapping[str, ModelSpec],
    micro_batches: Sequence[int],
    seq_len: int,
    dtype: str = "fp32",
    rounds: int = 5,
) -> Profile:
    """The profile of this machine for some models (by the name that block times refer to them with).

    With an initialised process group every rank calls this: blocks are timed on all ranks at once, as in a
    run, links for each group size from 2 to the world's; the ranks of one host agree but for noise, and
    rank 0's profile is the one to save. Without a group there is nothing to say about links.
    """
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    blocks = [
        time
        for name, spec in models.items()
        for time in measure_blocks(spec, name, micro_batches, seq_len, dtype=dtype, rounds=rounds)
    ]
    optimizer_rate, norm_rate = measure_optimizer()
    slowdown, drag = 1.0, 1.0
    if world > 1:
        spec = max(models.values(), key=lambda spec: spec.parameter_count())
        chain = _Chain(spec, "layer0", _random_text(spec.vocab, seq_len, 1), dtype)
        elements = sum(shape.size for shape in spec.parameters("layer0"))
        slowdown, drag = measure_interference(partial(chain.time_once, "keep", 1), elements)
    return Profile(
        origin=origin(world),
        models={name: spec.raw for name, spec in models.items()},
        blocks=tuple(blocks),
        optimizer_rate=optimizer_rate,
        norm_rate=norm_rate,
        runtime_base_memory=measure_base_memory(),
        communications=measure_links(range(2, world + 1)) if world > 1 else (),
        slowdown_under_communication=slowdown,
        drag_under_compute=drag,
    )


def origin(processes: int = 1) -> Origin:
    """This machine, now."""
    import torch

    return Origin(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        host=platform.node(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        processes=processes,
    )


def measure_base_memory() -> float:
    """Resident bytes of a fresh process that has imported what a run imports and used autograd once."""
    done = subprocess.run([sys.executable, "-c", _BASE_PROBE], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_optimizer(rounds: int = 7) -> tuple[float, float]:
    """Parameters a second of an update, and of the gradient's norm: fp32, clipped, several shards in turn, because
    in a run everything else has passed through the caches since a shard was last seen."""
    import torch

    from ratrain.runtime.shard_optimizer import AdamW, ShardOptimizer
    from ratrain.runtime.units import squared_norm

    settings = AdamW(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    shards = [
        (ShardOptimizer(torch.zeros(_SHARD), _SHARD // 2, settings), torch.ones(_SHARD))
        for _ in range(_SHARDS)
    ]
    seconds: dict[str, list[float]] = {"update": [], "norm": []}
    for number in range(rounds + 1):
        for optimizer, gradient in shards:
            begin = time.perf_counter()
            optimizer.step(gradient, lr=1e-4, scale=0.99)
            middle = time.perf_counter()
            if number > 0:
                seconds["update"].append(middle - begin)
        for _, gradient in shards:
            begin = time.perf_counter()
            squared_norm(gradient)
            if number > 0:
                seconds["norm"].append(time.perf_counter() - begin)
    return _SHARD / statistics.median(seconds["update"]), _SHARD / statistics.median(seconds["norm"])


def measure_blocks(
    spec: ModelSpec,
    spec_name: str,
    micro_batches: Sequence[int],
    seq_len: int,
    rungs: Sequence[Rung] = ("keep", "elementwise", "mlp", "inputs"),
    dtype: str = "fp32",
    rounds: int = 5,
) -> tuple[BlockTime, ...]:
    """Times of `embed`, of one layer for each different attention window, and of `head`.

    `spec_name` is the name under which the profile holds `spec.raw`; `dtype` is of the views ("fp32", "bf16",
    "fp16"). The first round warms up and is not counted. Layers are measured on every rung, embed and head
    on `keep`.
    """
    results: list[BlockTime] = []
    source = _random_text(spec.vocab, seq_len, max(micro_batches))
    for layer in _representatives(spec):
        names = ("embed", layer, "head") if not results else (layer,)
        chain = _Chain(spec, layer, source, dtype)
        samples: dict[tuple[Rung, int], list[_Times]] = {
            (r, size): [] for r in rungs for size in micro_batches
        }
        for number in range(rounds + 1):
            for (rung, size), kept in samples.items():
                sample = chain.time_once(rung, size)
                if number > 0:
                    kept.append(sample)
        for (rung, size), kept in samples.items():
            for name in names:
                if name == layer or rung == "keep":
                    medians = (statistics.median(column) for column in zip(*(times[name] for times in kept)))
                    results.append(BlockTime(spec_name, name, rung, size, seq_len, dtype, *medians))
    return tuple(results)


def _random_text(vocab: int, seq_len: int, sequences: int) -> Sampler:
    """Steps of that many sequences from a store of random tokens; its map stays when the folder goes."""
    import numpy as np

    from ratrain.data.sampler import Sampler
    from ratrain.data.store import open_store, write_store

    tokens = np.random.default_rng(0).integers(0, vocab, 1000 * seq_len)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        with write_store(store, vocab_size=vocab, end_id=0, tokenizer="none", source="random") as out:
            out.add_tokens(tokens)
        return Sampler(open_store(store), seq_len, sequences, seed=0)


def _representatives(spec: ModelSpec) -> list[str]:
    """One layer for each different attention window."""
    first_with_window: dict[int | None, str] = {}
    for index, window in enumerate(spec.windows):
        first_with_window.setdefault(window, f"layer{index}")
    return list(first_with_window.values())


_Times = Mapping[str, tuple[float, float, float]]
"""Seconds of forward, recovery and backward by block."""


class _Chain:
    """Embedding, some layers and head, as a stage runs them; embedding and head fetch their tokens as well.

    A block timed alone, over and over, is 15 % faster than among others: its weights, gradients and
    activations stay in the nearest cache.
    """

    def __init__(self, spec: ModelSpec, layer: str, source: Sampler, dtype: str) -> None:
        import torch

        from ratrain.model.blocks import build_block, build_positions

        view = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}[
            dtype
        ]
        positions = build_positions(spec, source.seq_len, view, torch.device("cpu"))
        self.source, self.steps = source, 0
        bytes_each = 2 * 4 * sum(shape.size for shape in spec.parameters(layer))
        count = min(max(2, _CHAIN_BYTES // bytes_each), _MOST_LAYERS, spec.layers)
        self.names = ["embed", *[layer] * count, "head"]
        self.blocks = [build_block(spec, name, positions, dtype=view) for name in self.names]
        for block in self.blocks:
            _materialise(block, view)

    def time_once(self, rung: Rung, size: int) -> _Times:
        """A micro-batch of `size` sequences forwards and backwards with the layers on `rung`; means over them."""
        import torch

        from ratrain.model import segment

        spent: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in self.names}
        segments = []
        output: Any = None
        self.steps += 1
        for name, block in zip(self.names, self.blocks):
            begin = time.perf_counter()
            passed: tuple[Any, ...] = (output,)
            if name in ("embed", "head"):
                data = self.source.sequences(self.steps, range(size))
                inputs, targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
                passed = (inputs,) if name == "embed" else (output, targets, targets.numel())
            output, kept = segment.forward(
                block, passed, rung if name.startswith("layer") else "keep", grad=True
            )
            spent[name][0] += time.perf_counter() - begin
            assert kept is not None
            segments.append(kept)
        gradient = None
        for name, kept in zip(reversed(self.names), reversed(segments)):
            times = [time.perf_counter()]
            kept.recover()
            times.append(time.perf_counter())
            gradient = kept.backward(gradient)
            times.append(time.perf_counter())
            spent[name][1] += times[1] - times[0] if name.startswith("layer") and rung != "keep" else 0.0
            spent[name][2] += times[2] - times[1]
        return {name: tuple(s / self.names.count(name) for s in of) for name, of in spent.items()}  # type: ignore[misc]


def _materialise(block: Block, view: torch.dtype) -> None:
    """Gives the block parameters and gradients in flat buffers, as a stage does."""
    import torch

    from ratrain.model.blocks import bind
    from ratrain.model.main_grad import attach_main_grad

    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, (module, attribute) in block.parameter_slots().items():
        shape = getattr(module, attribute).shape
        tensors[name] = torch.empty(shape, dtype=view).normal_(0.0, 0.02, generator=generator)
    for parameter in bind(block, tensors).values():
        attach_main_grad(parameter, torch.zeros(parameter.shape, dtype=torch.float32))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
