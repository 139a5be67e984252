"""What every contender trains: one Llama, one stream of tokens, one set of initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ratrain.data.sampler import Sampler
from ratrain.data.store import is_store, open_store, write_store
from ratrain.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

SEED = 0
LEARNING_RATE = 1e-3
WEIGHT_DECAY, BETA1, BETA2, EPSILON = 0.1, 0.9, 0.95, 1e-8
_TOKENS = 1 << 19
_EXPONENT = 1.1
"""Of the Zipf law the tokens are drawn from: a loss that falls shows a wrong gradient, one that cannot does not."""


@dataclass(frozen=True)
class Model:
    """A Llama's shape, and the sequences it is trained on."""

    hidden: int = 512
    intermediate: int = 1408
    layers: int = 8
    heads: int = 8
    vocab: int = 8192
    seq_len: int = 128

    def config(self) -> dict[str, object]:
        """As config.json of Hugging Face has it."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq_len,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }

    def spec(self) -> ModelSpec:
        """As RATrain reads it."""
        return ModelSpec.from_dict(self.config(), "race")


def prepare_tokens(model: Model, folder: Path) -> Path:
    """A token store for the model's vocabulary under `folder`, made once."""
    store = folder / f"zipf-{model.vocab}"
    if not is_store(store):
        share = np.arange(1, model.vocab + 1, dtype=np.float64) ** -_EXPONENT
        ids = np.random.default_rng(SEED).choice(model.vocab, _TOKENS, p=share / share.sum())
        with write_store(store, vocab_size=model.vocab, end_id=0, tokenizer=None, source="zipf") as writer:
            writer.add_tokens(ids)
    return store


def open_tokens(model: Model, store: Path, global_batch: int) -> Sampler:
    """The sequences of every step, the same for all contenders."""
    return Sampler(open_store(store, vocab_size=model.vocab), model.seq_len, global_batch, SEED)


def initial_weight(model: Model, name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's first value: of its Hugging Face name and SEED only."""
    from ratrain.model.blocks import initial_value

    return initial_value(model.spec(), name, shape, SEED)
