"""The memory model: what one rank of a stage holds, from shapes alone.

With Ψ parameters on the rank and D replicas (ZeRO after Rajbhandari et al., 2020): 16-bit views with 16-bit
gradients take 2Ψ + 2Ψ + 12Ψ under ZeRO-0, 2Ψ + 2Ψ + 12Ψ/D under ZeRO-1, 2Ψ + 2Ψ/D + 12Ψ/D under ZeRO-2,
16Ψ/D under ZeRO-3; fp32 views are their own masters: 4Ψ + 4Ψ + 8Ψ/D under ZeRO-1. Each unit is padded to a
multiple of D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ratrain.model.spec import RUNGS, ModelSpec
from ratrain.model.tensor_slice import tensor_slice
from ratrain.plan.activations import ActivationModel
from ratrain.plan.forecast import StageMemory
from ratrain.plan.plan import Plan
from ratrain.plan.precision import Precision
from ratrain.program.deps import POSTED
from ratrain.program.layout import EMBED, HEAD, TIED
from ratrain.program.memory import Footprint, peak
from ratrain.program.passes import build
from ratrain.program.program import Program
from ratrain.program.slots import gradient_capacity, view_slots

_PIECE = 16 * 2**20
"""Bytes in which the MT-3000 backend receives a reduction, two pieces at a time."""


@dataclass(frozen=True)
class StateModel:
    """Bytes that a rank holds all step long. A stage is described by its decoder layers and by whether it is
    the first (embedding) and the last (head).

    spec     of what a rank computes: with several tensor ranks, its slice
    message  bytes of a micro-batch between two blocks
    overlapped_sync, overlapped_gather  whether reductions and gathers run beside computation, which then
    needs room for two units instead of one (`program.slots`)
    """

    spec: ModelSpec
    precision: Precision
    data: int
    tensor: int
    zero: int
    operators: str
    runtime_base: int
    message: int
    overlapped_sync: bool
    overlapped_gather: bool

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan) -> StateModel:
        """The model of a plan's ranks."""
        return cls(
            tensor_slice(spec, plan.tensor),
            plan.precision,
            plan.data,
            plan.tensor,
            plan.zero,
            plan.operators,
            plan.runtime_base,
            activation_model(spec, plan).message,
            "layerwise_sync" in plan.passes,
            "update_prefetch" in plan.passes,
        )

    def padded(self, unit: str) -> int:
        """Elements of a state unit, padded to a multiple of D."""
        return -(-_elements(self.spec, unit) // self.data) * self.data

    def stage(self, layers: int, first: bool, last: bool) -> StageMemory:
        """The constant part of a stage's memory."""
        return _stage(self, layers, first, last)

    @cached_property
    def sharded_gradients(self) -> bool:
        """Gradients are reduced for every micro-batch and kept as slices."""
        return self.zero >= 2 and self.data > 1

    @cached_property
    def sharded_views(self) -> bool:
        """Views are gathered for every use."""
        return self.zero == 3 and self.data > 1


@lru_cache(maxsize=4096)
def _elements(spec: ModelSpec, unit: str) -> int:
    """Parameters of a state unit: a block's, or the tied matrix."""
    if unit == TIED:
        return spec.vocab * spec.hidden
    shapes = spec.parameters(unit)
    return sum(s.size for s in shapes if not (unit == HEAD and spec.tied and s.name == spec.head_weight))


def activation_model(spec: ModelSpec, plan: Plan) -> ActivationModel:
    """The activation bytes of a plan's micro-batch."""
    return ActivationModel(
        tensor_slice(spec, plan.tensor),
        plan.operators,
        plan.micro_batch,
        plan.seq_len,
        plan.precision.view_bytes,
        plan.precision.grad_bytes,
        plan.slice_tokens,
    )


def footprints(spec: ModelSpec, plan: Plan) -> tuple[Footprint, ...]:
    """Per stage, what `program.memory.peak` and the checker need."""
    states, activations = StateModel.of(spec, plan), activation_model(spec, plan)
    last = plan.pipeline - 1
    return tuple(
        Footprint(
            constant=states.stage(count, s == 0, s == last).constant + (s == last) * _logits(spec, plan),
            kept={(block, rung): activations.saved(block, rung) for block in blocks for rung in RUNGS},
            working={block: activations.working(block) for block in blocks},
            boundary=activations.message,
        )
        for s, (count, blocks) in enumerate(zip(plan.layers, plan.layout().stages))
    )


def breakdown(spec: ModelSpec, plan: Plan) -> tuple[StageMemory, ...]:
    """Per stage, the memory of one rank at its peak. `total` is `program.memory.peak` of the plan's steady
    program."""
    program = memory_program(plan)
    states, logits, kept = StateModel.of(spec, plan), activation_model(spec, plan).logits, _logits(spec, plan)
    table = []
    for s, footprint in enumerate(footprints(spec, plan)):
        most = peak(program, s, footprint)
        of_logits = logits if most.action is not None and most.action.unit == HEAD else 0
        last = s == plan.pipeline - 1
        constant = states.stage(plan.layers[s], s == 0, last)
        table.append(
            replace(constant, logits=last * kept + of_logits, activations=most.activations - of_logits)
        )
    return tuple(table)


def _logits(spec: ModelSpec, plan: Plan) -> int:
    """Bytes that the last stage keeps for logits."""
    grouped = plan.grouped if "grouped_ends" in plan.passes else 1
    in_flight = plan.layout().in_flight(plan.pipeline - 1, grouped)
    return activation_model(spec, plan).buffers(in_flight)


def memory_program(plan: Plan) -> Program:
    """A short program with the same peak on every stage.

    The peak is reached once the pipeline is full and `ahead` micro-batches more are recovered; further
    micro-batches repeat. Gathers and reductions have no saved activations.
    """
    layout = plan.layout().with_(microbatches=min(plan.micro_batches, plan.settled), replicas=1, zero=0)
    return build(layout, "steady", plan.passes)


def activation_peak(
    kept: Sequence[int],
    whole: Sequence[int],
    working: Sequence[int],
    in_flight: int,
    ahead: int | None,
    elided: bool,
) -> int:
    """Closed form of the activations in `program.memory.peak` of one stage, for the search.

    kept, whole  bytes per block on its rung, and on `keep`
    working      bytes per block while it runs
    in_flight    micro-batches at once
    ahead        as in Layout; None without forward-side recovery
    elided       nothing is dropped (then one micro-batch is in flight)
    """
    if elided:
        kept, ahead = whole, None
    newest, kept_sum, whole_sum = _at_work(kept, working), sum(kept), sum(whole)
    if kept_sum == whole_sum:
        return in_flight * kept_sum + newest
    if ahead is None or ahead == 0:
        early = whole[-1] - kept[-1] if ahead == 0 and in_flight > 1 else 0
        backward = max(
            w - k + work - sum(kept[i + 1 :]) for i, (k, w, work) in enumerate(zip(kept, whole, working))
        )
        turn = whole[0] + early - kept_sum  # one is all but released, and the next begins to be recovered
        return in_flight * kept_sum + max(early + newest, backward, turn)
    recovered = min(ahead + 1, in_flight)
    live = (in_flight - recovered) * kept_sum + recovered * whole_sum
    if recovered == in_flight:
        return live + _at_work(whole, working)
    return live + max(newest, whole[0] - kept_sum)


def grouped_bound(
    ungrouped: int, kept: Sequence[int], whole: Sequence[int], grouped: int, ahead: int, boundary: int
) -> int:
    """At most so many bytes of activations where `grouped` micro-batches go block by block.

    ungrouped  `activation_peak` with as many micro-batches in flight
    boundary   of what one block hands another

    Exact but for the tensors that wait between blocks where everything is kept. Recovered blocks of a group may
    all be copies of the one that dropped most. A plan's own forecast is its program's, see `breakdown`.
    """
    most = max(w - k for k, w in zip(kept, whole))
    return ungrouped + (grouped - 1) * boundary + (ahead + 1) * len(kept) * most


def _at_work(held: Sequence[int], working: Sequence[int]) -> int:
    """The most that a pass over the blocks adds to all being held: what works less what is not yet held."""
    most, missing = 0, 0
    for bytes_held, work in zip(reversed(held), reversed(working)):
        most = max(most, work - missing)
        missing += bytes_held
    return most


@lru_cache(maxsize=65536)
def _stage(model: StateModel, layers: int, first: bool, last: bool) -> StageMemory:
    spec, precision, data = model.spec, model.precision, model.data
    middle = ["layer0"] * layers
    lead = [TIED if spec.tied else EMBED] if first else []
    close = ([HEAD] if first and spec.tied else [TIED, HEAD] if spec.tied else [HEAD]) if last else []
    order = [*lead, *middle, *close]
    sizes = {unit: model.padded(unit) for unit in set(order)}
    whole = sum(sizes[unit] for unit in order)
    owned = whole // data if model.zero else whole
    tied_twice = spec.tied and first and last  # read by two blocks of one stage
    across = spec.tied and first != last

    views, gathered = whole, 0
    if model.sharded_views:
        stays = sum(sizes[u] for u in order if u == TIED)
        views = stays + (whole - stays) // data
        passing = [sizes[u] for u in order if u != TIED]
        gathered = view_slots(passing, model.overlapped_gather).capacity
    gradients, unreduced = whole, 0
    if model.sharded_gradients:
        gradients = whole // data
        shared = [sizes[u] for u in order if not (u == TIED and tied_twice)]
        unreduced = gradient_capacity(shared[::-1], model.overlapped_sync)
        unreduced += sizes[TIED] if tied_twice else 0
    return StageMemory(
        runtime=model.runtime_base,
        views=views * precision.view_bytes,
        gathered=gathered * precision.view_bytes,
        gradients=gradients * precision.grad_bytes,
        unreduced=unreduced * precision.grad_bytes,
        shard=owned * precision.shard_bytes,
        communication=POSTED * model.message * 2 * ((not first) + (not last))
        + _reduction(model, max(sizes.values()))
        + _sums(model)
        + (sizes[TIED] // (data if model.zero else 1) * precision.grad_bytes if across else 0),
    )


def _sums(model: StateModel) -> int:
    """Bytes in which tensor ranks sum a micro-batch's products: the sum, and what is received for it."""
    return model.message + (model.tensor - 1) * model.message // model.tensor if model.tensor > 1 else 0


def _reduction(model: StateModel, largest: int) -> int:
    """Bytes that a reduction over the replicas receives into, and casts into where the wire has another
    dtype than the accumulation."""
    if model.data == 1:
        return 0
    precision = model.precision
    part = largest // model.data * precision.reduce_bytes
    if model.operators == "mt3000":
        return 2 * min(part, _PIECE)
    return (model.data - 1) * part * (1 if precision.reduce == precision.grad else 2)
