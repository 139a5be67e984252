"""LM head and loss as one operator that owns its backward.

Autograd holds the logits, their log-softmax, its gradient and a weight-gradient temporary: at 150,000 rows
each of the first three is larger than the rest of the model's activations. Here there is one logits buffer:
the backward turns it into its own gradient, which then goes into `main_grad` by one `addmm_`.

With `slice_tokens` not even that buffer exists: forward and backward go through the tokens in slices and the
backward multiplies again, one third more work in the head for memory that does not grow with the
micro-batch. Slices are of tokens, not of the vocabulary, because each token's softmax is then complete
within its slice, so loss and gradient are the unsliced formulas.

Buffers of the logits' size come from a `Scratch` and go back to it. Made and freed for every micro-batch they
leave holes in the heap that smaller tensors then occupy: 12 of 17 MB each after 40 micro-batches.

Baichuan2 normalises the rows of its head. Scaling a column of the logits by one over its row's norm does the
same, without a second matrix of the head's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ratrain.model.main_grad import accumulate_product, has_main_grad, subtract_scaled_rows

IGNORED = -100
"""Target of a token that does not count."""
_SMALLEST_NORM = 1e-12


class Scratch:
    """Large buffers that one head uses again and again; as many as it holds at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def take(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised `[rows, columns]`, on the device of `like`."""
        free = self._free.get((rows, columns, dtype))
        return free.pop() if free else like.new_empty((rows, columns), dtype=dtype)

    def give(self, buffer: Tensor) -> None:
        """Returns what was taken."""
        rows, columns = buffer.shape
        self._free.setdefault((rows, columns, buffer.dtype), []).append(buffer)


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    denominator: int,
    normalised: bool = False,
    slice_tokens: int | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Sum of the token losses divided by `denominator`.

    Args:
        hidden: `[batch, seq, hidden]`, after the final norm.
        weight: `[vocab, hidden]`.
        targets: int64 `[batch, seq]`, `IGNORED` where no token counts.
        denominator: target tokens of the global batch, at least 1.
        normalised: whether each row of `weight` counts as if of length 1.
        slice_tokens: tokens whose logits exist at a time; None holds all of them until the backward.
        scratch: of this head; None makes every buffer anew.

    Returns:
        A scalar, fp32, or fp64 if `hidden` is fp64.
    """
    keep_logits = torch.is_grad_enabled() and slice_tokens is None
    result: Tensor = _HeadLoss.apply(
        hidden, weight, targets, denominator, normalised, slice_tokens, keep_logits, scratch or Scratch()
    )
    return result


def plain_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, denominator: int, normalised: bool = False
) -> Tensor:
    """`head_loss` in plain autograd, to compare with."""
    logits = plain_logits(hidden, weight, normalised)
    logits = logits.to(_loss_dtype(logits)).view(-1, weight.shape[0])
    total = nn.functional.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
    return total / denominator


def plain_logits(hidden: Tensor, weight: Tensor, normalised: bool = False) -> Tensor:
    """`[batch, seq, vocab]`, in the dtype of `hidden`."""
    return nn.functional.linear(hidden, nn.functional.normalize(weight) if normalised else weight)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        denominator: int,
        normalised: bool,
        slice_tokens: int | None,
        keep_logits: bool,
        scratch: Scratch,
    ) -> Tensor:
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        inverse_norms = _inverse_norms(weight) if normalised else None
        total = torch.zeros((), dtype=_loss_dtype(hidden), device=hidden.device)
        logits = None
        for part in _slices(len(labels), slice_tokens):
            logits = _logits(rows[part], weight, inverse_norms, scratch)
            # The gradient of normalised rows needs the logits themselves later.
            total += _loss_sum(logits, labels[part], not normalised, scratch)
            if not keep_logits:
                scratch.give(logits)
                logits = None
        # The backward writes over this buffer, so it is no business of save_for_backward.
        ctx.logits, ctx.inverse_norms = logits, inverse_norms
        ctx.save_for_backward(hidden, targets)
        ctx.weight, ctx.denominator, ctx.slice_tokens = weight, denominator, slice_tokens
        ctx.scratch = scratch
        return total / denominator

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, targets), weight = ctx.saved_tensors, ctx.weight
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        scale = grads[0] / ctx.denominator
        grad_rows = torch.empty_like(rows)
        grad_weight = None
        if ctx.needs_input_grad[1] and not has_main_grad(weight):
            grad_weight = torch.zeros_like(weight)
        scratch: Scratch = ctx.scratch
        for part in _slices(len(labels), ctx.slice_tokens):
            logits = ctx.logits
            if logits is None:
                logits = _logits(rows[part], weight, ctx.inverse_norms, scratch)
            ctx.logits = along_rows = None
            if ctx.inverse_norms is None:
                _to_gradient(logits, labels[part], scale, logits, scratch)
            else:
                gradient = scratch.take(len(logits), logits.shape[1], logits, logits.dtype)
                _to_gradient(logits, labels[part], scale, gradient, scratch)
                # A row's gradient loses its component along the row: sum of gradient x logit, over length.
                along_rows = logits.mul_(gradient).sum(0, dtype=scale.dtype) * ctx.inverse_norms**2
                torch.mul(gradient, ctx.inverse_norms.to(gradient.dtype), out=logits)
                scratch.give(gradient)
            # From here `logits` holds the gradient with respect to the product of rows and weight.
            torch.mm(logits, weight, out=grad_rows[part])
            if ctx.needs_input_grad[1]:
                _add_weight_gradient(weight, grad_weight, logits, rows[part], along_rows)
            scratch.give(logits)
        return grad_rows.view(hidden.shape), grad_weight, None, None, None, None, None, None


def _add_weight_gradient(
    weight: Tensor, grad_weight: Tensor | None, grad_logits: Tensor, rows: Tensor, along_rows: Tensor | None
) -> None:
    """Add `grad_logits.T @ rows - along_rows * weight` to `grad_weight`, or if that is None to `main_grad`."""
    if grad_weight is None:
        accumulate_product(weight, grad_logits.t(), rows)
        if along_rows is not None:
            subtract_scaled_rows(weight, along_rows, weight)
        return
    grad_weight.addmm_(grad_logits.t(), rows)
    if along_rows is not None:
        grad_weight.sub_(along_rows.unsqueeze(1).to(weight.dtype) * weight)


def _loss_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _slices(tokens: int, size: int | None) -> list[slice]:
    if size is None:
        return [slice(0, tokens)]
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _inverse_norms(weight: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=_loss_dtype(weight))
    return norms.clamp_min(_SMALLEST_NORM).reciprocal()


def _logits(rows: Tensor, weight: Tensor, inverse_norms: Tensor | None, scratch: Scratch) -> Tensor:
    logits = scratch.take(len(rows), len(weight), rows, rows.dtype)
    torch.mm(rows, weight.t(), out=logits)
    return logits if inverse_norms is None else logits.mul_(inverse_norms.to(logits.dtype))


def _loss_sum(logits: Tensor, labels: Tensor, overwrite: bool, scratch: Scratch) -> Tensor:
    """Sum of the token losses. With `overwrite`, logits (`[tokens, vocab]`) in the precision of the loss
    become their log-softmax, which serves the backward as well."""
    logarithms = logits
    if not overwrite or logits.dtype != _loss_dtype(logits):
        logarithms = scratch.take(len(logits), logits.shape[1], logits, _loss_dtype(logits)).copy_(logits)
    torch.log_softmax(logarithms, -1, out=logarithms)
    counted = labels != IGNORED
    chosen = logarithms.gather(1, labels.where(counted, 0).unsqueeze(1)).squeeze(1)
    total = -chosen.where(counted, 0).sum()
    if logarithms is not logits:
        scratch.give(logarithms)
    return total


def _to_gradient(logits: Tensor, labels: Tensor, scale: Tensor, result: Tensor, scratch: Scratch) -> None:
    """Gradient of `scale * sum of token losses` into `result`, which may be `logits` itself (`[tokens, vocab]`, or
    their log-softmax, whose softmax is the same)."""
    gradient = result
    if result.dtype != _loss_dtype(logits):
        gradient = scratch.take(len(logits), logits.shape[1], logits, _loss_dtype(logits)).copy_(logits)
        torch.softmax(gradient, -1, out=gradient)
    else:
        torch.softmax(logits, -1, out=gradient)
    counted = labels != IGNORED
    row = torch.arange(len(labels), device=labels.device)
    gradient[row, labels.where(counted, 0)] -= 1
    gradient.mul_((counted * scale).unsqueeze(1))
    if gradient is not result:
        result.copy_(gradient)
        scratch.give(gradient)
