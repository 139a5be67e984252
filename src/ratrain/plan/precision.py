"""The three number formats of a run, resolved, and what follows from them for memory."""

from __future__ import annotations

from dataclasses import dataclass

from ratrain.config import AUTO, PrecisionConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of one number."""

_ACCUMULATION = {"fp32": "fp32", "bf16": "fp32", "fp16": "fp16", "fp64": "fp64"}


@dataclass(frozen=True)
class Precision:
    """view    what forward and backward read
    grad    gradient accumulation
    reduce  gradients on the wire
    """

    view: str
    grad: str
    reduce: str

    @property
    def view_bytes(self) -> int:
        """Bytes of one number of a view, an activation or a message between stages."""
        return BYTES[self.view]

    @property
    def grad_bytes(self) -> int:
        """Bytes of one accumulated gradient."""
        return BYTES[self.grad]

    @property
    def reduce_bytes(self) -> int:
        """Bytes of one gradient on the wire."""
        return BYTES[self.reduce]

    @property
    def separate_master(self) -> bool:
        """16-bit views have an fp32 master beside them; wider views are their own master."""
        return self.view_bytes == 2

    @property
    def shard_bytes(self) -> int:
        """Bytes per owned parameter of what only the optimizer reads: two moments, and the master if it is
        not a slice of the view."""
        return 4 + 2 * 4 if self.separate_master else 2 * self.view_bytes


def resolve_precision(config: PrecisionConfig) -> Precision:
    """`auto` gradients are accumulated in fp32 (fp16 under fp16 views, fp64 under fp64) and travel as they
    are accumulated."""
    grad = _ACCUMULATION[config.view] if config.grad == AUTO else config.grad
    return Precision(config.view, grad, grad if config.reduce == AUTO else config.reduce)
