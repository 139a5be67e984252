"""What one of several tensor-parallel ranks computes of a model."""

from __future__ import annotations

import dataclasses

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec

ALL_REDUCES = 2
"""Per pass of a layer: after attention's and after the MLP's output projection (Shoeybi et al., 2019)."""


def tensor_slice(spec: ModelSpec, tensor: int) -> ModelSpec:
    """The shape of one rank's part: heads, MLP columns and vocabulary rows are cut, norms are not. UserError
    if heads or columns do not divide."""
    if tensor == 1:
        return spec
    for what, size in _cut(spec).items():
        if size % tensor:
            raise UserError(f"parallel.tensor {tensor} does not divide the model's {size} {what}")
    return dataclasses.replace(
        spec,
        heads=spec.heads // tensor,
        kv_heads=spec.kv_heads // tensor,
        intermediate=spec.intermediate // tensor,
        vocab=-(-spec.vocab // tensor),
    )


def divides(spec: ModelSpec, tensor: int) -> bool:
    """Whether `tensor_slice` exists."""
    return all(size % tensor == 0 for size in _cut(spec).values())


def _cut(spec: ModelSpec) -> dict[str, int]:
    return {
        "attention heads": spec.heads,
        "key-value heads": spec.kv_heads,
        "MLP columns": spec.intermediate,
    }
