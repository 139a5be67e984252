"""Text to token ids: train a byte-level BPE, or load a Hugging Face tokenizer; both from tokenizer.json."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ratrain.errors import UserError

END_TOKEN = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and the end token

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
# What transformers keeps beside tokenizer.json; copied along so that an export carries them.
_COMPANIONS = (
    _CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
# End tokens of the families we train, for a bare tokenizer.json that names none.
_USUAL_END_TOKENS = (END_TOKEN, "</s>", "<|end_of_text|>", "<eos>")
# The pattern of GPT-4's and Qwen2's tokenizers, where a line break ends a token. It has to be this one: for a
# Qwen2 model transformers puts it in, whatever the tokenizer's own files say (5.24).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PIECE = 1 << 20  # characters


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, and what the data pipeline needs to know of it.

    vocab_size counts up to the largest id, gaps and added tokens included: the rows an embedding needs.
    fingerprint: hex digest of everything that decides which ids a text gets.
    """

    backend: Tokenizer
    end_token: str
    end_id: int
    vocab_size: int
    fingerprint: str

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, int64 [n_i], all of it, without special tokens. Where a text spells a special
        token, the characters are encoded: no document can end itself.

        Long texts are encoded in pieces, side by side and in bounded memory. They are cut only between a line
        break and a character that is not blank, where the tokenizers we train, and the byte-level ones of
        Llama 3 and Qwen2, always end a token; others might have merged there, once per million characters.
        """
        pieces = [_pieces(text) for text in texts]
        encoded = iter(
            self.backend.encode_batch_fast(
                [piece for of_text in pieces for piece in of_text], add_special_tokens=False
            )
        )
        return [
            np.concatenate([np.array(next(encoded).ids, dtype=np.int64) for _ in of_text])
            for of_text in pieces
        ]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE whose id 0 is the end token.

    The result depends on the texts only. It has fewer than `vocab_size` ids if the texts hold too few
    distinct pairs. Raises UserError for a vocabulary that cannot hold all bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocabulary size {vocab_size} is too small; a byte-level tokenizer needs at least "
            f"{SMALLEST_VOCABULARY} (256 bytes and the end token)"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(iter(texts), trainer)
    return _describe(backend, END_TOKEN)


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Load a Hugging Face tokenizer folder or a tokenizer.json.

    Raises UserError when it is missing or damaged, or when no end token can be found.
    """
    file = Path(path) / _TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    try:
        # Through bytes: the library's own messages for missing files name neither file nor cause.
        backend = Tokenizer.from_buffer(file.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"tokenizer {path} has no {_TOKENIZER_FILE}; expected a Hugging Face tokenizer folder or "
            f"that file (older folders get one when transformers loads and saves them)"
        ) from None
    except OSError as error:
        raise UserError(
            f"tokenizer {file} cannot be read ({error.strerror or error}); check its path"
        ) from error
    except Exception as error:  # the library raises bare Exception, ValueError and KeyError alike
        reason = " ".join(str(error).split())
        raise UserError(
            f"tokenizer {file} is damaged or unknown ({reason}); save it again with transformers"
        ) from error
    # Some published files carry a length to cut or pad to: it would drop text without a word.
    backend.no_truncation()
    backend.no_padding()
    return _describe(backend, _end_token(file, backend))


def save_tokenizer(tokenizer: TextTokenizer, folder: Path, *, like: str | Path | None = None) -> None:
    """Write into `folder` (made if missing) what `transformers.AutoTokenizer.from_pretrained` loads.

    like: where the tokenizer was loaded from; its files are copied as they are. Without it, a
    tokenizer_config.json is written that names the end token for end, begin and padding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = None if like is None else Path(like)
    if source is not None and source.is_dir():
        for name in (_TOKENIZER_FILE, *_COMPANIONS):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        (folder / _TOKENIZER_FILE).write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    if not (folder / _CONFIG_FILE).exists():
        # Padding shares the end token's id, as is usual for GPT-like models; targets are masked by position.
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.end_token,
            "bos_token": tokenizer.end_token,
            "pad_token": tokenizer.end_token,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _describe(backend: Tokenizer, end_token: str) -> TextTokenizer:
    backend.encode_special_tokens = True
    ids = backend.get_vocab(with_added_tokens=True)
    identity = json.dumps([backend.to_str(), end_token])
    return TextTokenizer(
        backend=backend,
        end_token=end_token,
        end_id=ids[end_token],
        vocab_size=max(ids.values()) + 1,
        fingerprint=hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
    )


def _end_token(file: Path, backend: Tokenizer) -> str:
    """The end token that the files beside tokenizer.json name, else a usual one that the vocabulary has."""
    named = [
        token
        for name in (_CONFIG_FILE, "special_tokens_map.json")
        if (token := _named_end_token(file.parent / name)) is not None
    ]
    for token in named[:1] or _USUAL_END_TOKENS:
        if backend.token_to_id(token) is not None:
            return token
    if named:
        raise UserError(
            f"tokenizer {file.parent}: end token {named[0]!r} is not in the vocabulary; mend its eos_token"
        )
    raise UserError(f'tokenizer {file} names no end token; expected "eos_token" in {_CONFIG_FILE} beside it')


def _named_end_token(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        values: Any = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); save the tokenizer again with transformers") from None
    token = values.get("eos_token") if isinstance(values, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        cut = _seam(text, start + _PIECE)
        if cut is None:
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _seam(text: str, after: int) -> int | None:
    """First place from `after` on between a line break and a character that is not blank."""
    at = text.find("\n", after)
    while 0 <= at < len(text) - 1:
        if not text[at + 1].isspace():
            return at + 1
        at = text.find("\n", at + 1)
    return None
