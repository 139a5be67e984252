"""What one of several tensor ranks holds and computes of a model (Shoeybi et al., 2019).

Queries, keys, values, gate and up are cut by rows, so that a rank has whole heads and whole MLP columns; the
projections behind them by columns, their biases not at all; embedding and head by rows of the vocabulary; norms are
whole on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec, ParameterShape

if TYPE_CHECKING:
    from torch import Tensor

ALL_REDUCES = 2
"""Per pass of a layer: after attention's and after the MLP's output projection."""

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


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


def cannot_run(spec: ModelSpec) -> str | None:
    """Why the runtime cannot cut this model for tensor ranks; None if it can."""
    if spec.family == "baichuan":
        return "Baichuan2's fused W_pack and row-normalised head are not cut"
    if spec.dropout:
        return "tensor ranks would draw other dropout masks than one rank does"
    return None


def cut_dimension(name: str) -> int | None:
    """Along which dimension a parameter (by Hugging Face name) is cut; None: every rank has the whole."""
    module, kind = name.split(".")[-2:]
    if module in _BY_ROWS:
        return 0
    return 1 if module in _BY_COLUMNS and kind == "weight" else None


def cut(value: Tensor, name: str, tensor: int, index: int, shape: Sequence[int]) -> Tensor:
    """Rank `index`'s part of a whole parameter, of `shape`; where the vocabulary ends early, zeros follow."""
    dimension = cut_dimension(name)
    if tensor == 1 or dimension is None:
        return value
    size = shape[dimension]
    start = min(index * size, value.shape[dimension])
    part = value.narrow(dimension, start, min(size, value.shape[dimension] - start))
    if part.shape[dimension] == size:
        return part
    padded = value.new_zeros(tuple(shape))
    padded[: part.shape[0]] = part
    return padded


def joined(parts: Sequence[Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """The whole parameter, of `shape`, from all ranks' parts: inverse of `cut`."""
    import torch

    dimension = cut_dimension(name)
    if len(parts) == 1 or dimension is None:
        return parts[0]
    return torch.cat(list(parts), dimension).narrow(dimension, 0, shape[dimension])


def part_shapes(spec: ModelSpec, tensor: int) -> dict[str, ParameterShape]:
    """Every parameter as one rank has it, by name."""
    return tensor_slice(spec, tensor).all_parameters()


def _cut(spec: ModelSpec) -> dict[str, int]:
    return {
        "attention heads": spec.heads,
        "key-value heads": spec.kv_heads,
        "MLP columns": spec.intermediate,
    }
