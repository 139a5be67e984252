"""Seconds that computing takes on one device: of a block's forward, backward and recovery, and of updates.

Three sources, in this order of trust: a profile (measured blocks, and shapes between them), the MT-3000
operator model, and a platform's rates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from ratrain.errors import UserError
from ratrain.machine.gpu_operators import GpuOperators, Work
from ratrain.machine.platform import LOCAL, Platform
from ratrain.machine.profile import BlockTime, Profile
from ratrain.model.operators import Operator, forward_operators
from ratrain.model.spec import RUNGS, ModelSpec
from ratrain.plan.precision import BYTES

_KEPT: Mapping[str, Callable[[Operator], bool]] = {
    "keep": lambda operator: True,
    "elementwise": lambda operator: operator.kind in ("matmul", "attention"),
    "mlp": lambda operator: operator.name.endswith(("q_proj", "k_proj", "v_proj", "W_pack", "o_proj", "attention")),
    "inputs": lambda operator: False,
}  # fmt: skip
"""Per rung, which operators of a layer a recovery does not run again. The last projection and its residual
are never needed: they only make the output."""
_OUTPUT_ONLY = ("down_proj", "mlp_residual")

BACKWARD_TIMES = {
    "matmul": 2.0,
    "attention": 2.5,
    "norm": 2.0,
    "elementwise": 2.0,
    "lookup": 1.0,
    "loss": 1.0,
}
"""An operator's backward in multiples of its forward. A matmul's is two matmuls of its size; attention's is
five of its two products' size, since the scores are computed again."""


@dataclass(frozen=True)
class BlockSeconds:
    """Of one block and micro-batch.

    forward, backward  on the rung `keep`
    recover            by rung, what the backward does not include
    passes             (forward, backward) on other rungs where they are known to differ: saving nothing takes
                       less time than saving everything, and picking what to save takes more
    """

    forward: float
    backward: float
    recover: Mapping[str, float]
    passes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def on(self, rung: str) -> tuple[float, float]:
        """Forward and backward on a rung."""
        return self.passes.get(rung, (self.forward, self.backward))

    @property
    def least(self) -> float:
        """Forward and backward on the rung where they take least."""
        return min(sum(self.on(rung)) for rung in RUNGS)

    def changed(self, times: float = 1.0, plus: float = 0.0, recover_plus: float = 0.0) -> BlockSeconds:
        """Every pass `times` as long and `plus` longer; recoveries that do something, `recover_plus`."""
        recover = {
            r: times * s + (recover_plus if r == "inputs" and s > 0 else 0.0) for r, s in self.recover.items()
        }
        passes = {r: (times * f + plus, times * b + plus) for r, (f, b) in self.passes.items()}
        return BlockSeconds(
            times * self.forward + plus,
            times * self.backward + plus,
            MappingProxyType(recover),
            MappingProxyType(passes),
        )


Blocks = Callable[[ModelSpec, str, int, int], BlockSeconds]
"""Seconds of a block by model, name, micro-batch and sequence length."""

Pass = Callable[[Sequence[Operator], bool], float]
"""Seconds of a forward, or a backward, of some of a block's operators."""


class Compute:
    """Prices blocks and updates. `efficiency` divides every time: the one factor that may be calibrated."""

    def __init__(self, source: Platform | Profile, dtype: str) -> None:
        self.source, self.dtype = source, dtype
        self.blocks: Blocks
        if isinstance(source, Profile):
            self.blocks = _Measured(source, dtype)
            self.optimizer_rate = source.optimizer_rate
            self.basis = "measured blocks"
        else:
            self.blocks, self.basis = _of_platform(source, dtype)
            self.optimizer_rate = source.device.optimizer_rate
        self.efficiency = 1.0
        if isinstance(source, Platform):
            parameters = source.device.operator_model.parameters
            self.efficiency = parameters.get("step_efficiency_ratio", 1.0)

    def at(self, efficiency: float) -> Compute:
        """The same prices at another efficiency."""
        other = copy.copy(self)
        other.efficiency = efficiency
        return other

    def block(self, spec: ModelSpec, block: str, micro_batch: int, seq_len: int) -> BlockSeconds:
        """Seconds of `block` of `spec` (its tensor-parallel slice, where there is one)."""
        return self.blocks(spec, block, micro_batch, seq_len).changed(1 / self.efficiency)

    def update(self, parameters: int) -> float:
        """Seconds to update that many owned parameters."""
        return parameters / self.optimizer_rate / self.efficiency

    def norm(self, parameters: int) -> float:
        """Seconds to add up that many squares. Platform files do not say; it reads a seventh of what an update
        reads and writes."""
        return parameters / self.source.norm_rate if isinstance(self.source, Profile) else 0.0


class _Modelled:
    """Blocks as sums over their operators, as `seconds` prices a pass over some of them."""

    def __init__(self, seconds: Pass) -> None:
        self.seconds = seconds
        self.known: dict[tuple[ModelSpec, object, int, int], BlockSeconds] = {}

    def __call__(self, spec: ModelSpec, block: str, micro_batch: int, seq_len: int) -> BlockSeconds:
        window = spec.windows[int(block[5:])] if block.startswith("layer") else block
        key = (spec, window, micro_batch, seq_len)
        if key not in self.known:
            operators = forward_operators(spec, block, micro_batch, seq_len)
            self.known[key] = BlockSeconds(
                self.seconds(operators, False),
                self.seconds(operators, True),
                MappingProxyType({rung: self._recover(operators, block, rung) for rung in RUNGS}),
            )
        return self.known[key]

    def _recover(self, operators: tuple[Operator, ...], block: str, rung: str) -> float:
        if rung == "keep" or block == "embed":
            return 0.0
        kept = _KEPT["inputs"] if block == "head" else _KEPT[rung]
        return self.seconds([o for o in operators if not kept(o) and o.name not in _OUTPUT_ONLY], False)


def _of_platform(platform: Platform, dtype: str) -> tuple[Blocks, str]:
    device = platform.device
    if device.operator_model.name == "roofline":
        return _Modelled(_roofline(GpuOperators.of(device, dtype), BYTES[dtype])), "a roofline of its rates"
    if device.operator_model.name == "mt3000":
        if dtype != "fp16":
            raise UserError(
                f"{platform.name} is priced in fp16 only; set precision.view from {dtype} to fp16"
            )
        return _PerSample(_Modelled(_tile_schedules())), "MT-3000 tile schedules"
    basis = "a guess: run ratrain profile" if platform.name == LOCAL else "its matmul rate"
    return _Modelled(_flat(device.rate("matmul", dtype))), basis


def _flat(rate: float) -> Pass:
    """Everything at one rate of FLOP/s."""

    def seconds(operators: Sequence[Operator], backward: bool) -> float:
        times = BACKWARD_TIMES if backward else {}
        return sum(times.get(operator.kind, 1.0) * operator.flops for operator in operators) / rate

    return seconds


def _roofline(gpu: GpuOperators, element_bytes: int) -> Pass:
    """Arithmetic and memory traffic; the host launches a pass of a layer at a time, a backward as two."""

    def seconds(operators: Sequence[Operator], backward: bool) -> float:
        work = Work()
        for operator in operators:
            flops = operator.flops if operator.kind in ("matmul", "attention") else 0.0
            times = BACKWARD_TIMES[operator.kind] if backward else 1.0
            work += times * Work(flops, element_bytes * operator.elements)
        if any(operator.kind == "attention" for operator in operators):
            return gpu.layer_seconds(work, 2.0 if backward else 1.0)
        return gpu.seconds(work)

    return seconds


def _tile_schedules() -> Pass:
    from ratrain.machine.mt3000.chip import load_chip
    from ratrain.plan.tile_prices import TilePrices

    prices = TilePrices(load_chip())

    def seconds(operators: Sequence[Operator], backward: bool) -> float:
        return sum(prices.seconds(operator, backward) for operator in operators)

    return seconds


class _PerSample:
    """A micro-batch as so many times one sample: choosing schedules takes a while, and more samples gain the
    MT-3000's operators less than 2 %."""

    def __init__(self, one: Blocks) -> None:
        self.one = one

    def __call__(self, spec: ModelSpec, block: str, micro_batch: int, seq_len: int) -> BlockSeconds:
        return self.one(spec, block, 1, seq_len).changed(micro_batch)


class _Measured:
    """Blocks as a profile measured them; other sizes by their floating-point operations."""

    def __init__(self, profile: Profile, dtype: str) -> None:
        self.specs = {name: ModelSpec.from_dict(config, name) for name, config in profile.models.items()}
        self.times = [time for time in profile.blocks if time.dtype == dtype]
        self.known: dict[tuple[object, ...], BlockSeconds] = {}
        if not self.times:
            have = ", ".join(sorted({time.dtype for time in profile.blocks})) or "nothing"
            raise UserError(f"the profile has no {dtype} blocks (it has {have}); profile again with {dtype}")

    def __call__(self, spec: ModelSpec, block: str, micro_batch: int, seq_len: int) -> BlockSeconds:
        kind = "layer" if block.startswith("layer") else block
        window = spec.windows[int(block[5:])] if kind == "layer" else None
        key = (spec, kind, window, micro_batch, seq_len)
        if key not in self.known:
            by_rung = {rung: self._at(spec, block, kind, rung, micro_batch, seq_len) for rung in RUNGS}
            kept = by_rung["keep"] or next((t for t in by_rung.values() if t), None)
            if kept is None:
                raise UserError(f"the profile has no {kind} block; profile again")
            unknown = 0.0 if kind == "embed" else kept[0]  # a whole forward is the most it takes
            recover: dict[str, float] = {
                rung: found[1] if found else unknown for rung, found in by_rung.items()
            }
            recover["keep"] = 0.0
            passes: dict[str, tuple[float, float]] = {
                rung: (found[0], found[2]) for rung, found in by_rung.items() if found
            }
            self.known[key] = BlockSeconds(
                kept[0], kept[2], MappingProxyType(recover), MappingProxyType(passes)
            )
        return self.known[key]

    def _at(
        self, spec: ModelSpec, block: str, kind: str, rung: str, micro_batch: int, seq_len: int
    ) -> tuple[float, float, float] | None:
        """Forward, recovery and backward of a block of that kind on that rung, from the measured sizes around
        its own: between two of them time is a power of size, beyond them it is in proportion.
        """
        measured = [t for t in self.times if t.block.startswith(kind) and t.rung == rung]
        # Many short rows and few long ones are different work: the same batch where there is one.
        alike = [t for t in measured if (t.micro_batch, t.seq_len) == (micro_batch, seq_len)] or measured
        sizes = {
            _flops_or_bytes(self.specs[t.model], _block(t.block), t.micro_batch, t.seq_len): t for t in alike
        }
        if not sizes:
            return None
        size = _flops_or_bytes(spec, block, micro_batch, seq_len)
        below = max((known for known in sizes if known <= size), default=min(sizes))
        above = min((known for known in sizes if known >= size), default=max(sizes))
        low, high = _times(sizes[below]), _times(sizes[above])
        if below == above:
            forward, recover, backward = (t * size / below for t in low)
        else:
            share = math.log(size / below) / math.log(above / below)
            forward, recover, backward = (
                math.exp((1 - share) * math.log(t) + share * math.log(u)) if t and u else t
                for t, u in zip(low, high)
            )
        return forward, recover, backward


def _times(time: BlockTime) -> tuple[float, float, float]:
    return time.forward, time.recover, time.backward


@cache
def _flops_or_bytes(spec: ModelSpec, block: str, micro_batch: int, seq_len: int) -> float:
    """What a block's time goes with: operations, or for the embedding the elements that it copies."""
    if block == "embed":
        return float(micro_batch * seq_len * spec.hidden)
    return spec.forward_flops(block, micro_batch, seq_len)


def _block(name: str) -> str:
    return "layer0" if name == "layer" else name
