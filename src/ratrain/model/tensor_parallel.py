"""Tensor ranks at work: where the parts of a layer meet, and an embedding and head over a part of the vocabulary.

torch's own `parallelize_module` makes parameters DTensors. Here a parameter is a window of a flat buffer, and its
gradient goes straight into another by operators that own their backward (`linear`, `embedding`, `head`), which a
DTensor would bypass. So every rank builds transformers' layer with fewer heads and columns, and two functions stand
where Shoeybi et al. (2019) have f and g. Sums run in rank order, so that all ranks hold the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ratrain.model.embedding import lookup
from ratrain.model.head import IGNORED, LogitsPool, loss_dtype, token_slices
from ratrain.model.linear import Linear
from ratrain.model.main_grad import accumulate_product, has_main_grad


class TensorRanks(Protocol):
    """The ranks that compute a block together, as one of them sees it."""

    size: int
    me: int

    def all_reduce(self, buffer: Tensor) -> None:
        """Sums a 1-D buffer that divides by `size` over all ranks, in place, in rank order."""

    def gather(self, vector: Tensor) -> Tensor:
        """Every rank's vector, as rows in rank order."""


def spread(x: Tensor, ranks: TensorRanks) -> Tensor:
    """`x`, which every rank has and each uses for its own part: its gradient is summed over the ranks."""
    result: Tensor = _Spread.apply(x, ranks)
    return result


def join(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of every rank's `x`; its gradient is every rank's own."""
    result: Tensor = _Join.apply(x, ranks)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.ranks), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return _sum(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _sum(x: Tensor, ranks: TensorRanks) -> Tensor:
    padded = -(-x.numel() // ranks.size) * ranks.size
    buffer = x.new_zeros(padded) if padded != x.numel() else x.new_empty(padded)
    buffer[: x.numel()] = x.reshape(-1)
    ranks.all_reduce(buffer)
    return buffer[: x.numel()].view(x.shape)


def join_layer(layer: nn.Module, ranks: TensorRanks) -> None:
    """Lets a decoder layer of one rank's heads and columns meet the others: its norms' outputs are spread, its
    output projections' joined."""
    parts = dict(layer.named_modules())
    for name in ("input_layernorm", "post_attention_layernorm"):
        parts[name].register_forward_hook(lambda module, inputs, output: spread(output, ranks))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        parts[name].register_forward_hook(lambda module, inputs, output: _joined(module, output, ranks))


def _joined(module: nn.Module, output: Tensor, ranks: TensorRanks) -> Tensor:
    assert isinstance(module, Linear)
    return join(output, ranks) if module.value_needed else output


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of embedding and head that one rank has: `size` from `start` on, of which `real` exist."""

    ranks: TensorRanks
    start: int
    size: int
    real: int

    @classmethod
    def of(cls, ranks: TensorRanks, vocab: int) -> VocabularyPart:
        """This rank's of a vocabulary of `vocab`."""
        size = -(-vocab // ranks.size)
        start = ranks.me * size
        return cls(ranks, start, size, min(max(vocab - start, 0), size))

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ids are rows of this part, and their rows (0 for the others)."""
        rows = ids - self.start
        here = (rows >= 0) & (rows < self.real)
        return here, rows.where(here, 0)

    def lookup(self, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """`embedding.lookup` over all ranks' rows: `[batch, seq]` to `[batch, seq, hidden]`."""
        here, rows = self.find(ids)
        # Ids of other ranks read row 0; masked, they leave its gradient alone.
        own = None if padding is None or not 0 <= padding - self.start < self.real else padding - self.start
        found = lookup(rows, weight, own)
        return join(found.masked_fill(~here.unsqueeze(-1), 0), self.ranks)

    def head_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        denominator: int,
        slice_tokens: int | None,
        pool: LogitsPool,
    ) -> Tensor:
        """`head.head_loss` over all ranks' rows; `weight` is `[size, hidden]`."""
        keep_logits = torch.is_grad_enabled() and slice_tokens is None
        shared = spread(hidden, self.ranks)
        result: Tensor = _HeadLoss.apply(
            shared, weight, targets, denominator, self, slice_tokens, keep_logits, pool
        )
        return result

    def logits(self, rows: Tensor, weight: Tensor, pool: LogitsPool) -> Tensor:
        """`[tokens, size]`; rows that do not exist get no probability."""
        made = pool.take(rows, weight)
        torch.mm(rows, weight.t(), out=made)
        made[:, self.real :] = -torch.inf
        return made


class _HeadLoss(torch.autograd.Function):
    """As `head._HeadLoss`, but the softmax's normaliser is every rank's, and kept instead of the log-softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        denominator: int,
        vocabulary: VocabularyPart,
        slice_tokens: int | None,
        keep_logits: bool,
        pool: LogitsPool,
    ) -> Tensor:
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        total = torch.zeros((), dtype=loss_dtype(hidden), device=hidden.device)
        normaliser = torch.empty(len(labels), dtype=total.dtype, device=hidden.device)
        logits = None
        for part in token_slices(len(labels), slice_tokens):
            logits = vocabulary.logits(rows[part], weight, pool)
            wide = logits.to(total.dtype)
            here, index = vocabulary.find(labels[part])
            own = wide.gather(1, index.unsqueeze(1)).squeeze(1).where(here, 0)
            table = vocabulary.ranks.gather(torch.cat([torch.logsumexp(wide, -1), own]))
            sums, chosen = table.view(vocabulary.ranks.size, 2, -1).unbind(1)
            normaliser[part] = torch.logsumexp(sums, 0)
            counted = labels[part] != IGNORED
            total += (normaliser[part] - chosen.sum(0)).where(counted, 0).sum()
            if not keep_logits:
                pool.give(logits)
                logits = None
        ctx.logits, ctx.normaliser = logits, normaliser
        ctx.save_for_backward(hidden, targets)
        ctx.weight, ctx.denominator, ctx.slice_tokens, ctx.pool = weight, denominator, slice_tokens, pool
        ctx.vocabulary = vocabulary
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
        for part in token_slices(len(labels), ctx.slice_tokens):
            logits = ctx.logits
            if logits is None:
                logits = ctx.vocabulary.logits(rows[part], weight, ctx.pool)
            ctx.logits = None
            gradient = logits.to(ctx.normaliser.dtype)
            gradient.sub_(ctx.normaliser[part].unsqueeze(1)).exp_()
            here, index = ctx.vocabulary.find(labels[part])
            gradient[torch.arange(len(index), device=index.device), index] -= here.to(gradient.dtype)
            gradient.mul_(((labels[part] != IGNORED) * scale).unsqueeze(1))
            if gradient is not logits:
                logits.copy_(gradient)
            torch.mm(logits, weight, out=grad_rows[part])
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), rows[part])
            elif ctx.needs_input_grad[1]:
                accumulate_product(weight, logits.t(), rows[part])
            ctx.pool.give(logits)
        return grad_rows.view(hidden.shape), grad_weight, *[None] * 6
