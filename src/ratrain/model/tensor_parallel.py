"""Tensor ranks at work: where the parts of a layer meet, and an embedding and head over a part of the vocabulary.

torch's own `parallelize_module` makes parameters DTensors. Here a parameter is a window of a flat buffer, and its
gradient goes straight into another by operators that own their backward (`linear`, `embedding`, `head`), which a
DTensor would bypass. So every rank builds transformers' layer with fewer heads and columns, and two functions stand
where Shoeybi et al. (2019) have f and g. Sums run in rank order, so that all ranks hold the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ratrain.model.embedding import lookup
from ratrain.model.head import IGNORED
from ratrain.model.linear import Linear

_PARTS = 16
"""In which the sums of exponentials are made."""


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
        owner, _, attribute = name.rpartition(".")
        setattr(parts[owner], attribute, _JoinedLinear.of(parts[name], ranks))


class _JoinedLinear(Linear):
    """Cut by columns: the ranks' products are summed. The bias, which every rank has whole, is added once, to the
    sum, so that its gradient is the same on every rank, as a norm's is."""

    ranks: TensorRanks

    @classmethod
    def of(cls, linear: nn.Module, ranks: TensorRanks) -> Self:
        assert isinstance(linear, nn.Linear)
        made = cls.like(linear)
        made.ranks = ranks
        return made

    def forward(self, input: Tensor) -> Tensor:
        product = self.multiply(input, None)
        if self.value_needed:
            product = join(product, self.ranks)
        return product if self.bias is None else product + self.bias


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

    def loss_sum(self, logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of this rank's logits (`[tokens, size]`; those of rows that do not exist are overwritten) and the labels of
        all, in `dtype`: the sum of the token losses, and each token's normaliser, the same on every rank."""
        logits[:, self.real :] = -torch.inf
        wide = logits.to(dtype)
        here, index = self.find(labels)
        own = wide.gather(1, index.unsqueeze(1)).squeeze(1).where(here, 0)
        # A part at a time: logsumexp makes a copy of what it is given.
        sums = [torch.logsumexp(part, -1) for part in wide.split(max(1, len(wide) // _PARTS))]
        table = self.ranks.gather(torch.cat([*sums, own]))
        own_sums, chosen = table.view(self.ranks.size, 2, -1).unbind(1)
        normaliser = torch.logsumexp(own_sums, 0)
        return (normaliser - chosen.sum(0)).where(labels != IGNORED, 0).sum(), normaliser

    def to_gradient(self, logits: Tensor, labels: Tensor, scale: Tensor, normaliser: Tensor) -> None:
        """Turns the logits into the gradient of `scale` times `loss_sum`, in place."""
        logits[:, self.real :] = -torch.inf
        gradient = logits.to(normaliser.dtype)
        gradient.sub_(normaliser.unsqueeze(1)).exp_()
        here, index = self.find(labels)
        gradient[torch.arange(len(index), device=index.device), index] -= here.to(gradient.dtype)
        gradient.mul_(((labels != IGNORED) * scale).unsqueeze(1))
        if gradient is not logits:
            logits.copy_(gradient)
