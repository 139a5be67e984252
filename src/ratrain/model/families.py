"""Which transformers modules make up which family. The only file that names their classes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ratrain.errors import UserError
from ratrain.model.positions import PositionTable, window_masks
from ratrain.model.spec import ModelSpec

_PREFIX = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}


def decoder_layer(spec: ModelSpec, index: int) -> nn.Module:
    """The family's decoder layer on the meta device, with scaled_dot_product_attention."""
    with torch.device("meta"):
        layer: nn.Module = _class(spec, "DecoderLayer")(hf_config(spec), index)
    return layer.train()


def rms_norm(spec: ModelSpec) -> nn.Module:
    """The family's final norm on the meta device."""
    with torch.device("meta"):
        norm: nn.Module = _class(spec, "RMSNorm")(spec.hidden, eps=spec.norm_eps)
    return norm


def head_weight(spec: ModelSpec, weight: Tensor) -> Tensor:
    """What the LM head multiplies by, given its parameter."""
    return weight


def position_table(spec: ModelSpec, seq_len: int, dtype: torch.dtype, device: torch.device) -> PositionTable:
    """Positions 0 to `seq_len - 1` by the family's own rotary embedding."""
    if spec.max_positions is not None and seq_len > spec.max_positions:
        raise UserError(
            f"data.seq_len {seq_len} is beyond the model's {spec.max_positions} positions; "
            "lower it, or raise max_position_embeddings in the model's config.json"
        )
    rotary = _class(spec, "RotaryEmbedding")(hf_config(spec)).to(device)
    like = torch.empty(0, dtype=dtype, device=device)
    cos, sin = rotary(like, torch.arange(seq_len, device=device)[None])
    return PositionTable(cos, sin, window_masks(spec, seq_len, dtype, device))


def hf_config(spec: ModelSpec) -> Any:
    """The transformers configuration: config.json with what it left out as the spec resolved it."""
    config_class = getattr(_module(spec, "configuration"), f"{_PREFIX[spec.family]}Config")
    settings = {
        key: value for key, value in spec.raw.items() if key not in ("architectures", "dtype", "torch_dtype")
    }
    settings |= {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    config = config_class(**settings)
    config._attn_implementation = "sdpa"
    return config


def _class(spec: ModelSpec, kind: str) -> Any:
    return getattr(_module(spec, "modeling"), _PREFIX[spec.family] + kind)


def _module(spec: ModelSpec, kind: str) -> Any:
    return import_module(f"transformers.models.{spec.family}.{kind}_{spec.family}")
