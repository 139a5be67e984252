"""Which modules make up which family. The only file that names transformers' classes by family."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from ratrain.errors import UserError
from ratrain.model.positions import PositionTable, window_masks
from ratrain.model.spec import ModelSpec

# Package and class prefix in transformers. Baichuan2's norm, MLP and rotary embedding are Llama's.
_MODULES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "mistral": ("mistral", "Mistral"),
    "baichuan": ("llama", "Llama"),
}
# Keys of config.json that describe a file or a class, not the model.
_NOT_SETTINGS = ("architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version")


def decoder_layer(spec: ModelSpec, index: int) -> nn.Module:
    """The family's decoder layer on the meta device, with scaled_dot_product_attention."""
    with torch.device("meta"):
        if spec.family == "baichuan":
            from ratrain.model.baichuan import BaichuanDecoderLayer

            return BaichuanDecoderLayer(spec, hf_config(spec))
        layer: nn.Module = _class(spec, "DecoderLayer")(hf_config(spec), index)
    return layer


def rms_norm(spec: ModelSpec) -> nn.Module:
    """The family's final norm on the meta device."""
    with torch.device("meta"):
        norm: nn.Module = _class(spec, "RMSNorm")(spec.hidden, eps=spec.norm_eps)
    return norm


def position_table(spec: ModelSpec, seq_len: int, dtype: torch.dtype, device: torch.device) -> PositionTable:
    """Positions 0 to `seq_len - 1` by the family's own embedding of them; raises `UserError` beyond the
    model's last."""
    if spec.positions == "alibi":
        from ratrain.model.baichuan import alibi_mask

        mask = alibi_mask(spec, seq_len, dtype, device)
        return PositionTable(None, None, (mask,) * spec.layers)
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
    """The transformers configuration: config.json with what it left out as the spec resolved it, and sizes as the
    spec has them, which may be those of a tensor rank."""
    package, prefix = _MODULES[spec.family]
    config_class = getattr(_import(package, "configuration"), f"{prefix}Config")
    settings = {key: value for key, value in spec.raw.items() if key not in _NOT_SETTINGS}
    sizes = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
    }
    config = config_class(**settings | sizes)
    config._attn_implementation = "sdpa"
    return config


def _class(spec: ModelSpec, kind: str) -> Any:
    package, prefix = _MODULES[spec.family]
    return getattr(_import(package, "modeling"), prefix + kind)


def _import(package: str, kind: str) -> Any:
    return import_module(f"transformers.models.{package}.{kind}_{package}")
