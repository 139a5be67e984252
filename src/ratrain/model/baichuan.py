"""Baichuan2, the one family transformers does not ship.

Written from the published model's description: a Llama-like decoder with queries, keys and values in one
matrix, `W_pack`, and an LM head whose rows are normalised (in `head`). The 7B type has rotary positions, the
13B type ALiBi (https://arxiv.org/abs/2108.12409): a penalty on the score that grows linearly with distance,
at a slope of its own for each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from ratrain.model.spec import ModelSpec


class BaichuanAttention(nn.Module):
    """Causal self-attention with fused projections, `[3 * hidden, hidden]`: queries, keys, values."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = spec.heads, spec.head_dim, spec.dropout
        self.W_pack = nn.Linear(spec.hidden, 3 * spec.hidden, bias=False)
        self.o_proj = nn.Linear(spec.hidden, spec.hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        packed = self.W_pack(x).unflatten(-1, (3, self.heads, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in packed.unbind(-3))
        if rotary is not None:
            query, key = apply_rotary_pos_emb(query, key, *rotary)
            # A copy, or the view would keep the unrotated queries and keys alive until the backward.
            value = value.contiguous()
        attended = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class BaichuanDecoderLayer(nn.Module):
    """One layer, with the call signature of transformers' decoder layers."""

    def __init__(self, spec: ModelSpec, config: Any) -> None:
        super().__init__()
        self.self_attn = BaichuanAttention(spec)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(spec.hidden, eps=spec.norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(spec.hidden, eps=spec.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, position_embeddings, attention_mask)
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head: a geometric sequence for a power of two, and otherwise that of the next smaller
    power of two followed by every other one of the next larger (the ALiBi paper's reference code)."""
    power = 1 << (heads.bit_length() - 1)
    slopes = _geometric(power)
    return (slopes + _geometric(2 * power)[0::2])[:heads]


def _geometric(heads: int) -> tuple[float, ...]:
    start = 2.0 ** (-8.0 / heads)
    return tuple(start ** (head + 1) for head in range(heads))


def alibi_mask(spec: ModelSpec, seq_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[1, heads, seq, seq]` to add to the scores: `-slope * distance` to the past, -inf to the future."""
    position = torch.arange(seq_len, device=device)
    distance = position[:, None] - position[None, :]
    mask = torch.empty(1, spec.heads, seq_len, seq_len, dtype=dtype, device=device)
    for head, slope in enumerate(alibi_slopes(spec.heads)):
        mask[0, head] = (-slope * distance.double()).masked_fill(distance < 0, -torch.inf)
    return mask
