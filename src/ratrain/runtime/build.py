"""Puts one rank together: its units, its blocks bound to them, and the stage that works on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratrain.model.blocks import bind, build_block, build_positions, initial_value
from ratrain.model.spec import ModelSpec, ParameterShape
from ratrain.model.tensor_slice import cut, cut_dimension, tensor_slice
from ratrain.program.layout import HEAD, TIED, Layout
from ratrain.program.schedule import gradients_in_turn, keeps_view, reduces_per_microbatch
from ratrain.program.slots import gradient_capacity, view_slots
from ratrain.runtime.backends import TorchBackend
from ratrain.runtime.collectives import RankOrderReducer
from ratrain.runtime.device import HostStreams
from ratrain.runtime.mesh import Mesh
from ratrain.runtime.optimizer import StepRule
from ratrain.runtime.shard_optimizer import AdamW
from ratrain.runtime.stage import Stage
from ratrain.runtime.units import StateUnit, UnitFormat, UnreducedGradients, padded

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of number formats in configuration and plan."""


@dataclass(frozen=True)
class StageSettings:
    """What shapes a stage besides its layout. `slice_tokens`: see `model.head.head_loss`."""

    seq_len: int
    micro_batch: int
    seed: int
    formats: UnitFormat
    adamw: AdamW
    slice_tokens: int | None = None


def unit_parameters(spec: ModelSpec, layout: Layout, unit: str) -> tuple[ParameterShape, ...]:
    """The parameters of a state unit. A tied matrix is a unit of its own; the head keeps its norm."""
    if unit == TIED:
        return spec.parameters("embed")
    shared = {p.name for p in spec.parameters("embed")} if layout.tied and unit == HEAD else set()
    return tuple(p for p in spec.parameters(unit) if p.name not in shared)


def build_stage(
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    settings: StageSettings,
    passes: Collection[str],
    rule: StepRule,
    device: torch.device,
    value: Callable[[ParameterShape], Tensor] | None = None,
    streams: HostStreams | None = None,
    backend: TorchBackend | None = None,
) -> Stage:
    """The stage of this rank with its parameters in place.

    passes   of the program that the stage will run
    value    gives a parameter's initial value (any float dtype); None: fresh ones from the seed
    streams  of the device; None: host threads
    backend  who computes; None: torch
    """
    backend = backend or TorchBackend()
    whole = value or (lambda p: initial_value(spec, p.name, p.shape, settings.seed))
    parts = RankOrderReducer(mesh.parts) if mesh.tensor > 1 else None
    own = tensor_slice(spec, mesh.tensor)
    shapes = spec.all_parameters()

    def read(p: ParameterShape) -> Tensor:
        return cut(whole(shapes[p.name]), p.name, mesh.tensor, mesh.part, p.shape)

    view_reducer = RankOrderReducer(mesh.prefetch)
    grad_reducer = RankOrderReducer(
        mesh.sync, None if settings.formats.wire == settings.formats.grad else settings.formats.wire
    )
    parameters = {u.name: unit_parameters(own, layout, u.name) for u in layout.units[mesh.stage]}
    places, gradients = _passing(parameters, layout, mesh.stage, settings, passes, device)
    units: dict[str, StateUnit] = {}
    for unit in layout.units[mesh.stage]:
        units[unit.name] = StateUnit(
            unit.name,
            parameters[unit.name],
            layout.zero if layout.replicas > 1 else 0,
            grad_reducer,
            view_reducer,
            settings.formats,
            settings.adamw,
            device,
            places.get(unit.name),
            gradients.get(unit.name),
            counts_in_norm=not (unit.name == TIED and layout.tied_across and mesh.stage > 0),
            counted_elsewhere=[name for name in shapes if cut_dimension(name) is None] if mesh.part else (),
        )
        units[unit.name].load_parameters(read)
    positions = build_positions(spec, settings.seq_len, settings.formats.view, device)
    blocks = {}
    for name in layout.stages[mesh.stage]:
        block = build_block(
            spec, name, positions, settings.formats.view, slice_tokens=settings.slice_tokens, ranks=parts
        )
        tensors: dict[str, Tensor] = {}
        for unit_name in layout.reads(name):
            held = units[unit_name]
            tensors |= held.parameter_views([p.name for p in held.parameters])
        bound = bind(block, tensors)
        for unit in layout.units[mesh.stage]:
            if unit.name in layout.reads(name):
                mine = {p.name: bound[p.name] for p in units[unit.name].parameters}
                units[unit.name].attach(mine, first_reader=unit.readers[-1] == name)
        backend.adopt(block)
        blocks[name] = block
    draws = spec.dropout > 0
    return Stage(
        mesh,
        layout,
        blocks,
        units,
        settings.micro_batch,
        settings.seed,
        rule,
        draws,
        device,
        backend,
        streams,
    )


def _passing(
    parameters: Mapping[str, Sequence[ParameterShape]],
    layout: Layout,
    stage: int,
    settings: StageSettings,
    passes: Collection[str],
    device: torch.device,
) -> tuple[dict[str, Tensor], dict[str, UnreducedGradients]]:
    """Memory of what comes and goes, by unit: gathered views (ZeRO-3), unreduced gradients (ZeRO-2, 3)."""
    sizes = {u: padded(sum(p.size for p in parameters[u]), layout.replicas) for u in parameters}
    gathered = [u.name for u in layout.units[stage] if not keeps_view(layout, u.name)]
    slots = view_slots([sizes[u] for u in gathered], overlapped="update_prefetch" in passes)
    buffer = torch.zeros(slots.capacity, dtype=settings.formats.view, device=device)
    places = {u: buffer[start : start + sizes[u]] for u, start in zip(gathered, slots.starts)}
    if not reduces_per_microbatch(layout):
        return places, {}

    def memory(units: Sequence[str], overlapped: bool) -> UnreducedGradients:
        capacity = gradient_capacity([sizes[u] for u in units], overlapped)
        return UnreducedGradients(capacity, settings.formats.grad, device)

    in_turn = gradients_in_turn(layout, stage)
    shared = memory(in_turn, "layerwise_sync" in passes)
    return places, {u: shared if u in in_turn else memory([u], overlapped=False) for u in parameters}
