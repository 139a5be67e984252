"""Shape: a layout without its placement. Prices every possible stage of it, for the search.

All decoder layers are taken as equal here; the plan that comes out is checked and simulated block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ratrain.machine.collectives import Kind
from ratrain.model.spec import RUNGS
from ratrain.model.tensor_slice import tensor_slice
from ratrain.plan.activations import ActivationModel
from ratrain.plan.compute import BlockSeconds, Compute
from ratrain.plan.costs import with_tensor
from ratrain.plan.memory import StateModel, activation_peak, grouped_bound
from ratrain.plan.network import Network
from ratrain.plan.request import Request
from ratrain.plan.target import LAYER
from ratrain.program.layout import EMBED, HEAD


class Stage(NamedTuple):
    """One stage of a shape: its layers' rungs in order, seconds per micro-batch, and bytes at the peak.

    waits  in which reductions and gathers hold computation up
    links  that its own reductions and gathers fill its links
    """

    rungs: tuple[str, ...]
    forward: float
    backward: float
    recover: float
    waits: float
    links: float
    total: int

    @property
    def busy(self) -> float:
        """Seconds that a micro-batch occupies the stage."""
        return self.forward + self.backward + self.recover + self.waits


@dataclass(frozen=True)
class Shape:
    """Every choice but placement and rungs, for one request."""

    request: Request
    compute: Compute
    pipeline: int
    data: int
    tensor: int
    zero: int
    micro_batch: int
    ahead: int
    passes: tuple[str, ...]
    slice_tokens: int

    @cached_property
    def micro_batches(self) -> int:
        """M."""
        return self.request.global_batch // (self.data * self.micro_batch)

    @property
    def grouped(self) -> int:
        """Micro-batches grouped at the ends of a step, where the request says."""
        return min(self.request.grouped or 1, self.micro_batches)

    @property
    def groupable(self) -> bool:
        """As `Layout.ungroupable`."""
        reduces_each = self.zero >= 2 and self.data > 1
        return not reduces_each and not (self.request.spec.tied and self.pipeline == 1)

    @cached_property
    def activations(self) -> ActivationModel:
        """Bytes of a micro-batch on one rank."""
        precision = self.request.precision
        return ActivationModel(
            tensor_slice(self.request.spec, self.tensor),
            self.request.target.operators,
            self.micro_batch,
            self.request.seq_len,
            precision.view_bytes,
            precision.grad_bytes,
            self.slice_tokens,
        )

    @cached_property
    def states(self) -> StateModel:
        """Bytes of the states of one rank."""
        return StateModel(
            self.activations.spec,
            self.request.precision,
            self.data,
            self.tensor,
            self.zero,
            self.request.target.operators,
            self.request.target.base(self.activations),
            self.activations.message,
            self.overlapped,
            self.gathers_ahead,
        )

    @cached_property
    def network(self) -> Network:
        """Its links."""
        return Network(self.compute.source, self.data, self.tensor)

    @cached_property
    def overlapped(self) -> bool:
        """Whether reductions run beside the backwards."""
        return "layerwise_sync" in self.passes

    @cached_property
    def gathers_ahead(self) -> bool:
        """Whether views are gathered beside computation."""
        return "update_prefetch" in self.passes

    @cached_property
    def message(self) -> float:
        """Seconds of a message between stages."""
        return self.network.message(self.activations.message).seconds if self.pipeline > 1 else 0.0

    def seconds(self, block: str) -> BlockSeconds:
        """Of a block, its tensor-parallel all-reduces included: two a pass of a layer."""
        return self._seconds[block]

    def least_seconds(self, block: str) -> BlockSeconds:
        """At least so much: a tensor rank's slice, not priced yet, as its even share."""
        if self.tensor == 1:
            return self.seconds(block)
        request = self.request
        whole = self.compute.block(request.spec, block, self.micro_batch, request.seq_len)
        joined = self.network.over_tensor(self.activations.message).seconds
        return with_tensor(whole.changed(1 / self.tensor), block, joined)

    @cached_property
    def _seconds(self) -> dict[str, BlockSeconds]:
        joined = self.network.over_tensor(self.activations.message).seconds
        spec, seq_len = self.activations.spec, self.request.seq_len
        return {
            block: with_tensor(self.compute.block(spec, block, self.micro_batch, seq_len), block, joined)
            for block in (EMBED, LAYER, HEAD)
        }

    @cached_property
    def ladder(self) -> tuple[str, ...]:
        """Rungs worth taking, from `keep`: none beneath a mix of its neighbours in bytes and seconds."""
        saved: dict[str, int] = {rung: self.activations.saved(LAYER, rung) for rung in RUNGS}
        recover = self.seconds(LAYER).recover
        chosen: list[str] = ["keep"]
        while chosen[-1] != "inputs":
            here = chosen[-1]
            lower: list[str] = [rung for rung in RUNGS[RUNGS.index(here) + 1 :] if saved[rung] < saved[here]]
            if not lower:
                break
            chosen.append(
                min(lower, key=lambda r: ((recover[r] - recover[here]) / (saved[here] - saved[r]), saved[r]))
            )
        return tuple(chosen)

    def mixes(self, layers: int) -> Sequence[tuple[str, ...]]:
        """Rungs of `layers` layers from keeping all to dropping all, one layer's step at a time. The last
        layers keep most: they are recovered first, when the gradient is nearest."""
        if layers == 0:
            return [()]
        steps = [("keep",) * layers]
        for upper, lower in zip(self.ladder, self.ladder[1:]):
            steps += [(lower,) * n + (upper,) * (layers - n) for n in range(1, layers + 1)]
        return steps

    def stage(self, index: int, layers: int) -> Stage:
        """The stage with the least recovery that fits; with the most if none does."""
        key = (index, layers)
        if key not in self._stages:
            self._stages[key] = self._best(index, layers)
        return self._stages[key]

    @cached_property
    def _stages(self) -> dict[tuple[int, int], Stage]:
        return {}

    def _best(self, index: int, layers: int) -> Stage:
        mixes = self._fixed_rungs(index, layers) or self.mixes(layers)
        low, high = 0, len(mixes) - 1
        while low < high:
            middle = (low + high) // 2
            if self._total(index, mixes[middle]) <= self.request.target.memory:
                high = middle
            else:
                low = middle + 1
        return self._priced(index, mixes[low])

    def _fixed_rungs(self, index: int, layers: int) -> Sequence[tuple[str, ...]] | None:
        """Those of a given policy, as far as it names no blocks; where nothing needs to be dropped, nothing."""
        policy = self.request.policy
        if policy is None:
            return None
        rung = policy.get(f"stage{index}", policy.get("default", "keep"))
        return [("keep",) * layers] * self.elided(index) + [(rung,) * layers]

    def elided(self, index: int) -> bool:
        """Whether the stage's backwards directly follow their forwards, so that nothing is dropped."""
        alone = self._in_flight(index) == 1
        return alone and self.forward_side and self.request.elide is not False

    def _in_flight(self, index: int) -> int:
        grouped = self.grouped if "grouped_ends" in self.passes else 1
        return min(self.pipeline - index + grouped - 1, self.micro_batches)

    @cached_property
    def forward_side(self) -> bool:
        """Whether recovery is done ahead of the gradient."""
        return "forward_side_recovery" in self.passes

    @cached_property
    def _bytes(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Of a layer, saved by rung; of each kind of block, saved on `keep`, and at work."""
        model, kinds = self.activations, (EMBED, LAYER, HEAD)
        return (
            {rung: model.saved(LAYER, rung) for rung in RUNGS},
            {block: model.saved(block, "keep") for block in kinds},
            {block: model.working(block) for block in kinds},
        )

    @cached_property
    def _constants(self) -> dict[tuple[int, bool, bool], int]:
        return {}

    def _constant(self, layers: int, first: bool, last: bool) -> int:
        key = (layers, first, last)
        if key not in self._constants:
            kept = self.activations.buffers(self._in_flight(self.pipeline - 1)) if last else 0
            self._constants[key] = self.states.stage(layers, first, last).constant + kept
        return self._constants[key]

    def _total(self, index: int, rungs: tuple[str, ...]) -> int:
        first, last = index == 0, index == self.pipeline - 1
        by_rung, whole, working = self._bytes
        before, after = [EMBED] * first, [HEAD] * last
        blocks = [*before, *[LAYER] * len(rungs), *after]
        kept = [*(whole[b] for b in before), *(by_rung[r] for r in rungs), *(whole[b] for b in after)]
        every = [whole[block] for block in blocks]
        peak = activation_peak(
            kept,
            every,
            [working[block] for block in blocks],
            self._in_flight(index),
            self.ahead if self.forward_side else None,
            False,
        )
        if self.grouped > 1 and "grouped_ends" in self.passes:
            peak = grouped_bound(peak, kept, every, self.grouped, self.ahead, self.activations.message)
        return self._constant(len(rungs), first, last) + peak

    def _priced(self, index: int, rungs: tuple[str, ...]) -> Stage:
        first, last = index == 0, index == self.pipeline - 1
        blocks = [EMBED] * first + [LAYER] * len(rungs) + [HEAD] * last
        recover = [0.0] * first + [self.seconds(LAYER).recover[rung] for rung in rungs] + [0.0] * last
        kept = ["keep"] * first + list(rungs) + ["keep"] * last
        if last and self.forward_side:  # a micro-batch whose backward follows its forward drops nothing
            kept = ["keep"] * len(blocks)
        forward, backward = zip(*(self.seconds(block).on(rung) for block, rung in zip(blocks, kept)))
        waits = links = 0.0
        if self.states.sharded_gradients:
            reduce = [self._links[block][0] for block in blocks]
            gather = [self._links[block][1] * self.states.sharded_views for block in blocks]
            again = [r + b for r, b in zip(recover, backward)]
            waits = self._held_up(forward, gather) + self._held_up(again[::-1], gather[::-1], reduce[::-1])
            links = sum(reduce) + 2 * sum(gather)
        return Stage(
            rungs, sum(forward), sum(backward), sum(recover), waits, links, self._total(index, rungs)
        )

    def _held_up(
        self, compute: Sequence[float], gather: Sequence[float], reduce: Sequence[float] | None = None
    ) -> float:
        """Seconds that a pass over some units takes beyond computing. Beside a unit's computation the next is
        gathered and the one before reduced, no more, since no more than two exist whole."""
        reduce = reduce or [0.0] * len(compute)
        beside = [0.0] * len(compute)
        for i, (collected, reduced) in enumerate(zip([*gather[1:], gather[-1]], [0.0, *reduce[:-1]])):
            beside[i] = collected * self.gathers_ahead + reduced * self.overlapped
        held = sum(max(0.0, transfer - seconds) for seconds, transfer in zip(compute, beside))
        held += 0.0 if self.gathers_ahead else sum(gather)
        return held + (0.0 if self.overlapped else sum(reduce))

    @cached_property
    def _links(self) -> dict[str, tuple[float, float, float]]:
        """Per kind of block, link seconds of its reduction and of its gather, and seconds of its update."""
        precision, table = self.request.precision, {}
        kind: Kind = "reduce_scatter" if self.zero else "all_reduce"
        for block in (EMBED, LAYER, HEAD):
            size = self.states.padded(block)
            reduce = self.network.over_replicas(kind, size * precision.reduce_bytes).seconds
            gather = self.network.over_replicas("all_gather", size * precision.view_bytes).seconds
            update = self.compute.update(size // self.data if self.zero else size)
            table[block] = (reduce, gather if self.zero else 0.0, update)
        return table

    @property
    def least_links(self) -> float:
        """Link seconds of a micro-batch's own reductions and gathers on an average stage."""
        if not self.states.sharded_gradients:
            return 0.0
        table = 0.0
        for block, count in ((LAYER, self.request.spec.layers), (EMBED, 1), (HEAD, 1)):
            reduce, gather, _ = self._links[block]
            table += count * (reduce + 2 * gather * self.states.sharded_views)
        return table / self.pipeline

    def state_seconds(self, layers: int, first: bool, last: bool) -> tuple[float, float]:
        """Seconds of a step's reductions (ZeRO-0 and 1), and of its updates and gathers, of one stage."""
        reduces = not self.states.sharded_gradients
        gathers = not self.states.sharded_views
        reduce = after = 0.0
        for block, count in ((LAYER, layers), (EMBED, first), (HEAD, last)):
            once, gather, update = self._links[block]
            reduce += count * once * reduces
            after += count * (update + gather * gathers)
        return reduce, after
