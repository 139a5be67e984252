"""The peers' model: transformers' own Llama layers, cut where a stage begins and ends."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from race.workload import BETA1, BETA2, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Model, initial_weight


class Embedding(nn.Module):
    """Token ids `[batch, seq]` to `[batch, seq, hidden]`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab, model.hidden)
        fill(self, model, "model.")

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)


class Layer(nn.Module):
    """One decoder layer; with `recompute` only its input is kept."""

    def __init__(self, model: Model, index: int, recompute: bool) -> None:
        super().__init__()
        config = hf_config(model)
        self.layer = LlamaDecoderLayer(config, index)
        self.recompute = recompute
        with torch.no_grad():
            cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(model.seq_len)[None])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        fill(self.layer, model, f"model.layers.{index}.")

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer, x, use_reentrant=False)
        return self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        return self.layer(x, position_embeddings=(self.cos, self.sin))


class Head(nn.Module):
    """Final norm and LM head: logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(model.hidden, eps=hf_config(model).rms_norm_eps)
        self.lm_head = nn.Linear(model.hidden, model.vocab, bias=False)
        fill(self.norm, model, "model.norm.")
        fill(self.lm_head, model, "lm_head.")

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


class Stack(nn.Sequential):
    """Layers `first` to `last - 1`, with the embedding before layer 0 and the head after the last."""

    def __init__(self, model: Model, first: int, last: int, recompute: bool = False) -> None:
        parts: list[nn.Module] = [Embedding(model)] if first == 0 else []
        parts += [Layer(model, i, recompute) for i in range(first, last)]
        parts += [Head(model)] if last == model.layers else []
        super().__init__(*parts)


def hf_config(model: Model) -> LlamaConfig:
    """The transformers configuration."""
    config = LlamaConfig(**{k: v for k, v in model.config().items() if k != "model_type"}, use_cache=False)
    config._attn_implementation = "sdpa"
    return config


def fill(module: nn.Module, model: Model, prefix: str) -> None:
    """Gives every parameter its first value."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_weight(model, prefix + name, tuple(parameter.shape)))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens."""
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def parameter_groups(module: nn.Module) -> list[dict[str, object]]:
    """Matrices are decayed, norms are not."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


ADAMW = {"lr": LEARNING_RATE, "betas": (BETA1, BETA2), "eps": EPSILON, "fused": True}


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """torch's fused AdamW, as RATrain uses it."""
    return torch.optim.AdamW(parameter_groups(module), **ADAMW)
