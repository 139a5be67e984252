"""LM head and loss as one operator that owns its backward.

Autograd holds the logits, their log-softmax, its gradient and a weight-gradient temporary: at 150,000 rows
each of the first three is larger than the rest of the model's activations. Here there is one logits buffer:
the backward turns it into its own gradient, which then goes into `main_grad` by one `addmm_`.

With `slice_tokens` not even that buffer exists: forward and backward go through the tokens in slices and the
backward multiplies again, one third more work in the head for memory that does not grow with the
micro-batch. Slices are of tokens, not of the vocabulary, because each token's softmax is then complete
within its slice, so loss and gradient are the unsliced formulas.

The buffer comes from a `LogitsPool` and goes back to it. Made and freed for every micro-batch it would leave holes
in the heap that smaller tensors then occupy: 12 of 17 MB each after 40 micro-batches with 32,768 rows.

Baichuan2 normalises the rows of its head. Scaling a column of the logits by one over its row's norm does the
same, without a second matrix of the head's size.

Where tensor ranks share the vocabulary (`tensor_parallel.VocabularyPart`) the logits are a rank's own, and the
softmax's normaliser, which every rank then knows, is kept for the backward in place of the log-softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ratrain.model.main_grad import accumulate_product, has_main_grad, subtract_scaled_rows

if TYPE_CHECKING:
    from ratrain.model.tensor_parallel import VocabularyPart

IGNORED = -100
"""Target of a token that does not count."""
_SMALLEST_NORM = 1e-12


class LogitsPool:
    """A head's buffers for logits, used again and again: as many as micro-batches are in flight."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def take(self, rows: Tensor, weight: Tensor) -> Tensor:
        """An uninitialised `[tokens, vocab]` for the product of `rows` (`[tokens, hidden]`) and `weight`."""
        free = self._free.get((len(rows), len(weight), rows.dtype))
        return free.pop() if free else rows.new_empty((len(rows), len(weight)))

    def give(self, logits: Tensor) -> None:
        """Returns what was taken."""
        tokens, vocab = logits.shape
        self._free.setdefault((tokens, vocab, logits.dtype), []).append(logits)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that nobody has taken."""
        return sum(buffer.nbytes for free in self._free.values() for buffer in free)


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    denominator: int,
    normalised: bool = False,
    slice_tokens: int | None = None,
    pool: LogitsPool | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Sum of the token losses divided by `denominator`.

    Args:
        hidden: `[batch, seq, hidden]`, after the final norm.
        weight: `[vocab, hidden]`.
        targets: int64 `[batch, seq]`, `IGNORED` where no token counts.
        denominator: target tokens of the global batch, at least 1.
        normalised: whether each row of `weight` counts as if of length 1.
        slice_tokens: tokens whose logits exist at a time; None holds all of them until the backward.
        pool: of this head; None makes every buffer anew.
        part: which rows `weight` is of all; None: all. Not with `normalised`.

    Returns:
        A scalar, fp32, or fp64 if `hidden` is fp64.
    """
    keep_logits = torch.is_grad_enabled() and slice_tokens is None
    result: Tensor = _HeadLoss.apply(
        hidden,
        weight,
        targets,
        denominator,
        normalised,
        slice_tokens,
        keep_logits,
        pool or LogitsPool(),
        part,
    )
    return result


def plain_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, denominator: int, normalised: bool = False
) -> Tensor:
    """`head_loss` in plain autograd, to compare with."""
    logits = plain_logits(hidden, weight, normalised)
    logits = logits.to(loss_dtype(logits)).view(-1, weight.shape[0])
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
        pool: LogitsPool,
        part: VocabularyPart | None,
    ) -> Tensor:
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        inverse_norms = _inverse_norms(weight) if normalised else None
        total = torch.zeros((), dtype=loss_dtype(hidden), device=hidden.device)
        normaliser = None if part is None else total.new_empty(len(labels))
        logits = None
        for tokens in token_slices(len(labels), slice_tokens):
            logits = _logits(rows[tokens], weight, inverse_norms, pool)
            if part is None:
                # The gradient of normalised rows needs the logits themselves later.
                total += _loss_sum(logits, labels[tokens], overwrite=not normalised)
            else:
                assert normaliser is not None
                loss, normaliser[tokens] = part.loss_sum(logits, labels[tokens], total.dtype)
                total += loss
            if not keep_logits:
                pool.give(logits)
                logits = None
        # The backward writes over this buffer, so it is no business of save_for_backward.
        ctx.logits, ctx.inverse_norms, ctx.part, ctx.normaliser = logits, inverse_norms, part, normaliser
        ctx.save_for_backward(hidden, targets)
        ctx.weight, ctx.denominator, ctx.slice_tokens, ctx.pool = weight, denominator, slice_tokens, pool
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
        for tokens in token_slices(len(labels), ctx.slice_tokens):
            logits = ctx.logits
            if logits is None:
                logits = _logits(rows[tokens], weight, ctx.inverse_norms, ctx.pool)
            ctx.logits = along_rows = None
            if ctx.part is not None:
                ctx.part.to_gradient(logits, labels[tokens], scale, ctx.normaliser[tokens])
            elif ctx.inverse_norms is None:
                _to_gradient(logits, labels[tokens], scale, overwrite=True)
            else:
                gradient = _to_gradient(logits, labels[tokens], scale, overwrite=False)
                # A row's gradient loses its component along the row: sum of gradient x logit, over length.
                along_rows = logits.mul_(gradient).sum(0, dtype=scale.dtype) * ctx.inverse_norms**2
                torch.mul(gradient, ctx.inverse_norms.to(gradient.dtype), out=logits)
                del gradient
            # The buffer holds the gradient of the product of rows and weight now.
            torch.mm(logits, weight, out=grad_rows[tokens])
            if ctx.needs_input_grad[1]:
                _add_weight_gradient(weight, grad_weight, logits, rows[tokens], along_rows)
            ctx.pool.give(logits)
        return grad_rows.view(hidden.shape), grad_weight, *[None] * 7


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


def loss_dtype(tensor: Tensor) -> torch.dtype:
    """The precision of the loss: fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(tensor.dtype, torch.float32)


def token_slices(tokens: int, size: int | None) -> list[slice]:
    """`tokens` in slices of `size`; None: one."""
    if size is None:
        return [slice(0, tokens)]
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _inverse_norms(weight: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=loss_dtype(weight))
    return norms.clamp_min(_SMALLEST_NORM).reciprocal()


def _logits(rows: Tensor, weight: Tensor, inverse_norms: Tensor | None, pool: LogitsPool) -> Tensor:
    logits = pool.take(rows, weight)
    torch.mm(rows, weight.t(), out=logits)
    return logits if inverse_norms is None else logits.mul_(inverse_norms.to(logits.dtype))


def _loss_sum(logits: Tensor, labels: Tensor, overwrite: bool) -> Tensor:
    """Sum of the token losses. With `overwrite`, logits (`[tokens, vocab]`) in the precision of the loss
    become their log-softmax, which serves the backward as well."""
    wide = logits.to(loss_dtype(logits))
    in_place = overwrite or wide is not logits
    logarithms = torch.log_softmax(wide, -1, out=wide) if in_place else torch.log_softmax(wide, -1)
    counted = labels != IGNORED
    chosen = logarithms.gather(1, labels.where(counted, 0).unsqueeze(1)).squeeze(1)
    return -chosen.where(counted, 0).sum()


def _to_gradient(logits: Tensor, labels: Tensor, scale: Tensor, overwrite: bool) -> Tensor:
    """Gradient of `scale * sum of token losses` in the dtype of the logits (`[tokens, vocab]`) or of their
    log-softmax, whose softmax is the same; written over them with `overwrite`."""
    wide = logits.to(loss_dtype(logits))
    in_place = overwrite or wide is not logits
    gradient = torch.softmax(wide, -1, out=wide) if in_place else torch.softmax(wide, -1)
    counted = labels != IGNORED
    row = torch.arange(len(labels), device=labels.device)
    gradient[row, labels.where(counted, 0)] -= 1
    gradient.mul_((counted * scale).unsqueeze(1))
    if gradient.dtype == logits.dtype:
        return gradient
    return logits.copy_(gradient) if overwrite else gradient.to(logits.dtype)
