"""The token embedding that owns its backward: touched rows only, straight into `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ratrain.model.main_grad import accumulate_rows, has_main_grad


def lookup(ids: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """Rows of `weight` (`[vocab, hidden]`) by `ids` (int64 `[batch, seq]`): `[batch, seq, hidden]`.

    The row `padding` gets no gradient, as in `nn.Embedding(padding_idx=...)`. Autograd would fill a second
    `[vocab, hidden]` tensor with zeros and add all of it for every micro-batch.
    """
    if torch.is_grad_enabled() and weight.requires_grad and has_main_grad(weight):
        result: Tensor = _Lookup.apply(ids, weight, padding)
        return result
    return nn.functional.embedding(ids, weight, padding_idx=padding)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows, gradient = ids.reshape(-1), grads[0].reshape(-1, weight.shape[1])
        if ctx.padding is not None:
            gradient = gradient.masked_fill((rows == ctx.padding).unsqueeze(1), 0)
        accumulate_rows(weight, rows, gradient)
        return None, None, None
