"""The shape of a model, read from its config.json: no torch, no transformers.

Everything the planner asks about a model (parameters, operations, activation bytes) follows from
`ModelSpec`; `operators` and `activations` do the longer sums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ratrain.errors import UserError

Family = Literal["llama", "qwen2", "mistral", "baichuan"]
Positions = Literal["rotary", "alibi"]
Rung = Literal["keep", "elementwise", "mlp", "inputs"]

RUNGS: tuple[Rung, ...] = ("keep", "elementwise", "mlp", "inputs")
"""The recovery ladder, from nothing dropped to everything but the block's input dropped."""

_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "MistralForCausalLM": "mistral",
    "BaichuanForCausalLM": "baichuan",
}
_SUPPORTED = ", ".join(_ARCHITECTURES)
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Rotary scalings that transformers' own layers compute."""
# What the Hugging Face configuration classes assume when config.json leaves the key out.
_DEFAULT_MAX_POSITIONS: dict[Family, int | None] = {
    "llama": 2048,
    "qwen2": 32768,
    "mistral": 131072,
    "baichuan": None,
}
_DEFAULT_WINDOW: dict[Family, int | None] = {"llama": None, "qwen2": 4096, "mistral": 4096, "baichuan": None}
_BAICHUAN1_VOCAB = 64000


@dataclass(frozen=True)
class ParameterShape:
    """One parameter tensor: its Hugging Face name, its shape, and whether AdamW decays it
    (matrices yes; norms and biases no)."""

    name: str
    shape: tuple[int, ...]
    decay: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model's shape. Sizes are element counts; `raw` is the config.json it came from."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    positions: Positions
    max_positions: int | None
    rope_theta: float
    norm_eps: float
    initializer_range: float
    dropout: float
    windows: tuple[int | None, ...]
    """Sliding attention window of each layer, in tokens; None sees the whole past."""
    pad_token: int | None
    """Row of the embedding that starts at zero and gets no gradient from it, as in `nn.Embedding`."""
    rope_scaling: Mapping[str, Any] | None = field(default=None, compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
        """The spec of a parsed config.json; `source` names it in messages.

        Raises:
            UserError: unsupported architecture, or sizes that are missing or do not divide.
        """
        return _Reader(config, source).spec()

    @property
    def query_width(self) -> int:
        """Columns of the query projection, all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection, all heads."""
        return self.kv_heads * self.head_dim

    @property
    def head_weight(self) -> str:
        """Name of the matrix that the LM head multiplies by."""
        return "model.embed_tokens.weight" if self.tied else "lm_head.weight"

    @property
    def head_normalised(self) -> bool:
        """Whether the LM head's rows count as if of length 1 (Baichuan2)."""
        return self.family == "baichuan"

    def block_names(self) -> tuple[str, ...]:
        """`("embed", "layer0", ..., "layer{n-1}", "head")`, in forward order."""
        return ("embed", *(f"layer{index}" for index in range(self.layers)), "head")

    def parameters(self, block: str) -> tuple[ParameterShape, ...]:
        """Parameters of a block, in a fixed order. Tied: the head names the embedding matrix too."""
        if block == "embed":
            return (_matrix("model.embed_tokens.weight", self.vocab, self.hidden),)
        if block == "head":
            return (
                _vector("model.norm.weight", self.hidden),
                _matrix(self.head_weight, self.vocab, self.hidden),
            )
        return tuple(self._layer_parameters(f"model.layers.{layer_index(block)}."))

    def _layer_parameters(self, prefix: str) -> Iterator[ParameterShape]:
        hidden, query, kv = self.hidden, self.query_width, self.kv_width

        def linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[ParameterShape]:
            yield _matrix(f"{prefix}{name}.weight", rows, columns)
            if bias:
                yield _vector(f"{prefix}{name}.bias", rows)

        yield _vector(f"{prefix}input_layernorm.weight", hidden)
        if self.family == "baichuan":
            yield from linear("self_attn.W_pack", query + 2 * kv, hidden, self.qkv_bias)
        else:
            yield from linear("self_attn.q_proj", query, hidden, self.qkv_bias)
            yield from linear("self_attn.k_proj", kv, hidden, self.qkv_bias)
            yield from linear("self_attn.v_proj", kv, hidden, self.qkv_bias)
        yield from linear("self_attn.o_proj", hidden, query, self.o_bias)
        yield _vector(f"{prefix}post_attention_layernorm.weight", hidden)
        yield from linear("mlp.gate_proj", self.intermediate, hidden, self.mlp_bias)
        yield from linear("mlp.up_proj", self.intermediate, hidden, self.mlp_bias)
        yield from linear("mlp.down_proj", hidden, self.intermediate, self.mlp_bias)

    def all_parameters(self) -> dict[str, ParameterShape]:
        """Every parameter once (a tied matrix under its embedding name), by name, in forward order."""
        return {shape.name: shape for block in self.block_names() for shape in self.parameters(block)}

    def parameter_count(self) -> int:
        """Trainable elements of the whole model, a tied matrix counted once."""
        return sum(shape.size for shape in self.all_parameters().values())

    def forward_flops(self, block: str, micro_batch: int, seq_len: int) -> float:
        """Floating-point operations of one forward of a block (singly: `operators`)."""
        from ratrain.model.operators import forward_operators

        return sum(operator.flops for operator in forward_operators(self, block, micro_batch, seq_len))

    def saved_bytes(self, block: str, rung: Rung, micro_batch: int, seq_len: int, view_bytes: int) -> int:
        """Bytes that one micro-batch of a block holds between forward and backward on a rung;
        see `activations.saved_bytes`."""
        from ratrain.model.activations import saved_bytes

        return saved_bytes(self, block, rung, micro_batch, seq_len, view_bytes)

    def working_bytes(
        self,
        block: str,
        micro_batch: int,
        seq_len: int,
        view_bytes: int,
        grad_bytes: int,
        slice_tokens: int = 0,
    ) -> int:
        """Bytes that a block's forward or backward needs for a moment beyond what `keep` saves;
        see `activations.working_bytes`."""
        from ratrain.model.activations import working_bytes

        return working_bytes(self, block, micro_batch, seq_len, view_bytes, grad_bytes, slice_tokens)


def load_spec(path: Path) -> ModelSpec:
    """The spec of a config.json, or of a model folder that holds one.

    Raises:
        UserError: no such file, not JSON, or a model that cannot be trained here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{file}: no model configuration; model.config must be a config.json or a folder with one"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file}: not a readable config.json ({error}); expected Hugging Face JSON") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: holds a {type(config).__name__}; expected a JSON object of model settings")
    return ModelSpec.from_dict(config, str(file))


def layer_index(block: str) -> int:
    """3 for "layer3".

    Raises:
        ValueError: `block` is not a decoder layer's name.
    """
    digits = block.removeprefix("layer")
    if digits == block or not digits.isdigit():
        raise ValueError(f"{block!r} is no block name: embed, layer<i> or head")
    return int(digits)


def _matrix(name: str, rows: int, columns: int) -> ParameterShape:
    return ParameterShape(name, (rows, columns), decay=True)


def _vector(name: str, size: int) -> ParameterShape:
    return ParameterShape(name, (size,), decay=False)


class _Reader:
    """Reads and checks one config.json; every complaint names the file and the key."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def fail(self, message: str) -> UserError:
        return UserError(f"{self.source}: {message}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key} is missing; expected a positive whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.fail(f"{key} is {value!r}; expected a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"{key} is {value!r}; expected a number")
        return float(value)

    def family(self) -> Family:
        named = self.config.get("architectures") or []
        model_type = self.config.get("model_type")
        for architecture in named:
            if architecture in _ARCHITECTURES:
                return _ARCHITECTURES[architecture]
        if named or model_type not in _ARCHITECTURES.values():
            what = ", ".join(map(str, named)) or model_type or "none named"
            raise self.fail(f"unsupported architecture ({what}); expected one of {_SUPPORTED}")
        return next(family for family in _ARCHITECTURES.values() if family == model_type)

    def spec(self) -> ModelSpec:
        family = self.family()
        self.refuse_what_would_change_the_model(family)
        hidden, heads, layers = (
            self.size("hidden_size"),
            self.size("num_attention_heads"),
            self.size("num_hidden_layers"),
        )
        kv_heads = self.kv_heads(family, heads)
        head_dim = self.head_dim(family, hidden, heads)
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling")
        if rope is not None and not isinstance(rope, Mapping):
            raise self.fail(f"rope_parameters is {rope!r}; expected an object")
        scaling = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        if scaling not in _ROPE_TYPES:
            raise self.fail(f"rope type is {scaling!r}; expected one of {', '.join(_ROPE_TYPES)}")
        vocab = self.size("vocab_size")
        biased = bool(self.config.get("attention_bias", False)) and family == "llama"
        max_positions = _DEFAULT_MAX_POSITIONS[family]
        if self.config.get("max_position_embeddings") is not None:
            max_positions = self.size("max_position_embeddings")
        dropout = self.number("attention_dropout", 0.0)
        if not 0 <= dropout < 1:
            raise self.fail(f"attention_dropout is {dropout}; expected at least 0 and below 1")
        return ModelSpec(
            family=family,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=self.size("intermediate_size"),
            vocab=vocab,
            tied=bool(self.config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or biased,
            o_bias=biased,
            mlp_bias=bool(self.config.get("mlp_bias", False)) and family == "llama",
            # Baichuan2-13B is the one that names no max_position_embeddings: it has no positions to embed.
            positions="alibi" if family == "baichuan" and max_positions is None else "rotary",
            max_positions=max_positions,
            rope_theta=self.number("rope_theta", float((rope or {}).get("rope_theta") or 10000.0)),
            norm_eps=self.number("rms_norm_eps", 1e-6),
            initializer_range=self.number("initializer_range", 0.02),
            dropout=dropout,
            windows=self.windows(family, layers),
            pad_token=self.pad_token(vocab),
            rope_scaling=rope,
            raw=dict(self.config),
        )

    def refuse_what_would_change_the_model(self, family: Family) -> None:
        if self.config.get("quantization_config"):
            raise self.fail("quantization_config is set; expected unquantised weights, remove the key")
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise self.fail(f"hidden_act is {activation!r}; expected silu, the only one implemented")
        if family == "baichuan" and self.config.get("vocab_size") == _BAICHUAN1_VOCAB:
            raise self.fail(
                "a vocabulary of 64000 is Baichuan of the first generation; expected Baichuan2 (125696)"
            )
        if family == "baichuan" and self.config.get("tie_word_embeddings"):
            raise self.fail("tie_word_embeddings is true; expected false, Baichuan2's head has its own rows")

    def kv_heads(self, family: Family, heads: int) -> int:
        if "num_key_value_heads" in self.config or family == "baichuan":
            kv_heads = heads if family == "baichuan" else self.size("num_key_value_heads", heads)
        else:
            kv_heads = heads
        if heads % kv_heads:
            raise self.fail(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                "each key/value head serves the same number of heads"
            )
        return kv_heads

    def head_dim(self, family: Family, hidden: int, heads: int) -> int:
        if hidden % heads and (family in ("llama", "baichuan") or self.config.get("head_dim") is None):
            raise self.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads if family == "baichuan" else self.size("head_dim", hidden // heads)
        if head_dim % 2:
            raise self.fail(f"head_dim {head_dim} is odd; rotary positions need an even one")
        return head_dim

    def windows(self, family: Family, layers: int) -> tuple[int | None, ...]:
        window = self.config.get("sliding_window", _DEFAULT_WINDOW[family])
        switched_on = family == "mistral" or (
            family == "qwen2" and self.config.get("use_sliding_window", False)
        )
        if not switched_on or window is None:
            return (None,) * layers
        if isinstance(window, bool) or not isinstance(window, int) or window <= 0:
            raise self.fail(f"sliding_window is {window!r}; expected a positive number of tokens, or null")
        if family == "mistral":
            return (window,) * layers
        types = self.config.get("layer_types")
        if types is None:
            first = self.number("max_window_layers", 28)
            return tuple(window if index >= first else None for index in range(layers))
        if not isinstance(types, list) or len(types) != layers:
            raise self.fail(f"layer_types does not name a type for each of num_hidden_layers {layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def pad_token(self, vocab: int) -> int | None:
        pad = self.config.get("pad_token_id")
        if pad is None:
            return None
        if not isinstance(pad, int) or not -vocab <= pad < vocab:
            raise self.fail(
                f"pad_token_id is {pad!r}; expected a token of the vocabulary of {vocab}, or null"
            )
        return pad % vocab
