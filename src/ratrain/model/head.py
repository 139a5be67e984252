"""LM head and loss as one operator that owns its backward.

Autograd holds the logits, their log-softmax, its gradient and a weight-gradient temporary: at 150,000 rows
each of the first three is larger than the rest of the model's activations. Here there is one logits buffer:
the backward turns it into its own gradient, which then goes into `main_grad` by one `addmm_`.

With `slice_tokens` not even that buffer exists: forward and backward go through the tokens in slices and the
backward multiplies again, one third more work in the head for memory that does not grow with the
micro-batch. Slices are of tokens, not of the vocabulary, because each token's softmax is then complete
within its slice, so loss and gradient are the unsliced formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ratrain.model.main_grad import accumulate_product, has_main_grad

IGNORED = -100
"""Target of a token that does not count."""


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, denominator: int, slice_tokens: int | None = None
) -> Tensor:
    """Sum of the token losses divided by `denominator`.

    Args:
        hidden: `[batch, seq, hidden]`, normalised.
        weight: `[vocab, hidden]`.
        targets: int64 `[batch, seq]`, `IGNORED` where no token counts.
        denominator: target tokens of the global batch, at least 1.
        slice_tokens: tokens whose logits exist at a time; None holds all of them until the backward.

    Returns:
        A scalar, fp32, or fp64 if `hidden` is fp64.
    """
    keep_logits = torch.is_grad_enabled() and slice_tokens is None
    result: Tensor = _HeadLoss.apply(hidden, weight, targets, denominator, slice_tokens, keep_logits)
    return result


def plain_head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, denominator: int) -> Tensor:
    """`head_loss` in plain autograd, which can differentiate through a computed weight."""
    logits = nn.functional.linear(hidden, weight)
    logits = logits.to(_loss_dtype(logits)).view(-1, weight.shape[0])
    total = nn.functional.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
    return total / denominator


def _loss_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        denominator: int,
        slice_tokens: int | None,
        keep_logits: bool,
    ) -> Tensor:
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        total = torch.zeros((), dtype=_loss_dtype(hidden), device=hidden.device)
        logits = None
        for part in _slices(len(labels), slice_tokens):
            logits = rows[part] @ weight.t()
            total += _loss_sum(logits, labels[part])
            if not keep_logits:
                logits = None  # before the next slice is made
        # The backward writes over this buffer, so it is no business of save_for_backward.
        ctx.logits = logits
        ctx.save_for_backward(hidden, targets)
        ctx.weight, ctx.denominator, ctx.slice_tokens = weight, denominator, slice_tokens
        return total / denominator

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, targets), weight = ctx.saved_tensors, ctx.weight
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        scale = grads[0] / ctx.denominator
        grad_rows = torch.empty_like(rows)
        grad_weight = None
        for part in _slices(len(labels), ctx.slice_tokens):
            logits = rows[part] @ weight.t() if ctx.logits is None else ctx.logits
            ctx.logits = None
            grad_logits = _to_gradient(logits, labels[part], scale)
            torch.mm(grad_logits, weight, out=grad_rows[part])
            if not ctx.needs_input_grad[1]:
                pass
            elif has_main_grad(weight):
                accumulate_product(weight, grad_logits.t(), rows[part])
            else:
                product = grad_logits.t() @ rows[part]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            del logits, grad_logits  # before the next slice is made
        return grad_rows.view(hidden.shape), grad_weight, None, None, None, None


def _slices(tokens: int, size: int | None) -> list[slice]:
    if size is None:
        return [slice(0, tokens)]
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the token losses. Logits (`[tokens, vocab]`) in the precision of the loss are overwritten by
    their log-softmax, which serves the backward as well."""
    wide = logits.to(_loss_dtype(logits))
    torch.log_softmax(wide, -1, out=wide)
    counted = labels != IGNORED
    return -wide.gather(1, labels.where(counted, 0).unsqueeze(1)).squeeze(1).where(counted, 0).sum()


def _to_gradient(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """Gradient of `scale * sum of token losses`, written over the logits (`[tokens, vocab]`) or their
    log-softmax, whose softmax is the same."""
    probabilities = logits.to(_loss_dtype(logits))
    torch.softmax(probabilities, -1, out=probabilities)
    counted = labels != IGNORED
    row = torch.arange(len(labels), device=labels.device)
    probabilities[row, labels.where(counted, 0)] -= 1
    probabilities.mul_((counted * scale).unsqueeze(1))
    return logits if probabilities is logits else logits.copy_(probabilities)
