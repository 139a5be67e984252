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
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.machine.measure_links import measure_interference, measure_links
from ratrain.machine.profile import BlockTime, Origin, Profile

if TYPE_CHECKING:
    import torch

    from ratrain.model.blocks import Block
    from ratrain.model.spec import ModelSpec, Rung

OPTIMIZER_PARAMETERS = 4_000_000
_BASE_PROBE = (
    "import psutil, torch, torch.distributed, transformers.models.llama.modeling_llama; "
    "a = torch.ones(64, 64, requires_grad=True); (a @ a).sum().backward(); "
    "print(psutil.Process().memory_info().rss)"
)


def measure_machine(
    models: Mapping[str, ModelSpec], micro_batches: Sequence[int], seq_len: int, dtype: str = "fp32"
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
        for time in measure_blocks(spec, name, micro_batches, seq_len, dtype=dtype)
    ]
    slowdown, drag = measure_interference() if world > 1 else (1.0, 1.0)
    return Profile(
        origin=origin(world),
        models={name: spec.raw for name, spec in models.items()},
        blocks=tuple(blocks),
        optimizer_rate=measure_optimizer_rate(),
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


def measure_optimizer_rate(rounds: int = 7) -> float:
    """Parameters a second of torch's fused AdamW on fp32 flat shards, decayed and undecayed."""
    import torch

    shards = [torch.zeros(OPTIMIZER_PARAMETERS // 2, requires_grad=True) for _ in range(2)]
    for shard in shards:
        shard.grad = torch.ones_like(shard)
    optimizer = torch.optim.AdamW(shards, lr=1e-4, fused=True)
    optimizer.step()  # allocates the moments
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return OPTIMIZER_PARAMETERS / statistics.median(seconds)


def measure_blocks(
    spec: ModelSpec,
    model: str,
    micro_batches: Sequence[int],
    seq_len: int,
    rungs: Sequence[Rung] = ("keep", "elementwise", "mlp", "inputs"),
    dtype: str = "fp32",
    rounds: int = 5,
) -> tuple[BlockTime, ...]:
    """Times of `embed`, of one layer for each different attention window, and of `head`.

    `model` is the name under which the profile holds `spec.raw`; `dtype` is of the views ("fp32", "bf16",
    "fp16"). The first round warms up and is not counted. Layers are measured on every rung, embed and head
    on `keep`.
    """
    import torch

    from ratrain.model.blocks import build_block, build_positions

    view = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    positions = build_positions(spec, seq_len, view, torch.device("cpu"))
    results: list[BlockTime] = []
    for name in _representatives(spec):
        block = build_block(spec, name, positions, dtype=view)
        _materialise(block, view)
        block_rungs = rungs if name.startswith("layer") else ("keep",)
        cases: dict[tuple[Rung, int], list[tuple[float, float, float]]] = {
            (rung, size): [] for rung in block_rungs for size in micro_batches
        }
        for number in range(rounds + 1):
            for (rung, size), samples in cases.items():
                sample = _time_once(block, _inputs(spec, name, size, seq_len, view), rung)
                if number > 0:
                    samples.append(sample)
        for (rung, size), samples in cases.items():
            medians = (statistics.median(column) for column in zip(*samples))
            results.append(BlockTime(model, name, rung, size, seq_len, dtype, *medians))
    return tuple(results)


def _representatives(spec: ModelSpec) -> list[str]:
    first_with_window: dict[int | None, str] = {}
    for index, window in enumerate(spec.windows):
        first_with_window.setdefault(window, f"layer{index}")
    return ["embed", *first_with_window.values(), "head"]


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


def _inputs(spec: ModelSpec, name: str, size: int, seq_len: int, view: torch.dtype) -> tuple[Any, ...]:
    import torch

    tokens = torch.arange(size * seq_len).reshape(size, seq_len) % spec.vocab
    if name == "embed":
        return (tokens,)
    hidden = torch.randn(size, seq_len, spec.hidden, generator=torch.Generator().manual_seed(0)).to(view)
    return (hidden, tokens, size * seq_len) if name == "head" else (hidden,)


def _time_once(block: Block, inputs: tuple[Any, ...], rung: Rung) -> tuple[float, float, float]:
    """Seconds of forward, recovery and backward."""
    import torch

    from ratrain.model import segment

    times = [time.perf_counter()]
    output, kept = segment.forward(block, inputs, rung, grad=True)
    assert kept is not None
    times.append(time.perf_counter())
    kept.recover()
    times.append(time.perf_counter())
    gradient = torch.ones_like(output) if output.dim() else None
    before = time.perf_counter()
    kept.backward(gradient)
    after = time.perf_counter()
    recovery = times[2] - times[1] if rung != "keep" else 0.0
    return times[1] - times[0], recovery, after - before


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
