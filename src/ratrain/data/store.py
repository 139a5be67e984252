"""A corpus as tokens: one flat memory-mapped file of ids and a JSON header, in a folder of their own.

`tokens.bin` holds little-endian uint16 (uint32 for vocabularies above 65,536), all documents one after the
other with an end token after each. `store.json` holds the fields of `StoreHeader`. Opening maps, it reads
no token: ranks of one host share the pages.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.data.aside import written_aside
from ratrain.errors import UserError

HEADER_FILE = "store.json"
TOKENS_FILE = "tokens.bin"
FORMAT = "ratrain token store"
VERSION = 1

_CHUNK = 1 << 20  # tokens gathered before they are counted and written


@dataclass(frozen=True)
class StoreHeader:
    """What is known of a store without reading its tokens."""

    vocab_size: int
    dtype: str
    tokens: int
    documents: int
    max_id: int
    end_id: int
    source: str
    tokenizer: str | None
    """Fingerprint of the tokenizer that made the ids, if known."""
    unigram_entropy: float
    """Nats per token: the loss of a model that knows how often each token occurs, and nothing else."""
    checksum: str
    skips: dict[str, int] = field(default_factory=dict)
    """Documents passed over while reading the corpus, by reason."""
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class TokenStore:
    """An open store. `tokens`: read-only memory map, shape [header.tokens], uint16 or uint32."""

    path: Path
    header: StoreHeader
    tokens: NDArray[np.unsignedinteger[Any]]

    def counts(self) -> NDArray[np.int64]:
        """Occurrences of each token id, shape [vocab_size]. Reads the whole store."""
        counts = np.zeros(self.header.vocab_size, dtype=np.int64)
        for start in range(0, len(self.tokens), _CHUNK):
            counts += np.bincount(self.tokens[start : start + _CHUNK], minlength=self.header.vocab_size)
        return counts

    def verify(self) -> None:
        """Read the whole store (about a second per GB) and raise UserError if it is not what was written."""
        if _checksum(self.tokens) != self.header.checksum:
            raise _corrupt(self.path, f"{TOKENS_FILE} is not what was written (checksum differs)")


class StoreWriter:
    """Gathers documents into the files of a store; made by `write_store`, which says when they appear."""

    def __init__(
        self, stream: IO[bytes], *, vocab_size: int, end_id: int, tokenizer: str | None, source: str
    ) -> None:
        if not 0 <= end_id < vocab_size:
            raise UserError(
                f"end token id {end_id} is beyond the vocabulary of {vocab_size}; "
                f"ids go from 0 to {vocab_size - 1}"
            )
        self.skips: Counter[str] = Counter()
        self._stream = stream
        self._vocab_size, self._end_id = vocab_size, end_id
        self._tokenizer, self._source = tokenizer, source
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._end = np.array([end_id], dtype=np.int64)
        self._pending: list[NDArray[np.integer[Any]]] = []
        self._pending_tokens = 0
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._digest = hashlib.blake2b(digest_size=16)
        self._documents = 0

    def add_document(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append a document, ids of shape [n] without end token, and the end token."""
        self._append(ids)
        self._append(self._end)
        self._documents += 1

    def add_tokens(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append ids as they are; every end token among them ends a document."""
        self._append(ids)
        self._documents += int((ids == self._end_id).sum())

    def finish(self) -> StoreHeader:
        """Write what is pending and describe the whole. Raises UserError if there is not one token."""
        self._flush()
        total = int(self._counts.sum())
        if not total:
            raise UserError(f"corpus {self._source} gives no token; give it at least one document with text")
        return StoreHeader(
            vocab_size=self._vocab_size,
            dtype=self._dtype.str,
            tokens=total,
            documents=self._documents,
            max_id=int(self._counts.nonzero()[0][-1]),
            end_id=self._end_id,
            source=self._source,
            tokenizer=self._tokenizer,
            unigram_entropy=unigram_entropy(self._counts),
            checksum=self._digest.hexdigest(),
            skips=dict(sorted(self.skips.items())),
        )

    def _append(self, ids: NDArray[np.integer[Any]]) -> None:
        self._pending.append(ids)
        self._pending_tokens += len(ids)
        if self._pending_tokens >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        if not self._pending_tokens:
            return
        ids = np.concatenate(self._pending)
        self._pending, self._pending_tokens = [], 0
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise _beyond_vocabulary(self._source, worst, self._vocab_size)
        self._counts += np.bincount(ids, minlength=self._vocab_size)
        raw = ids.astype(self._dtype).tobytes()
        self._digest.update(raw)
        self._stream.write(raw)


@contextmanager
def write_store(
    folder: Path, *, vocab_size: int, end_id: int, tokenizer: str | None, source: str
) -> Iterator[StoreWriter]:
    """Yield a writer; when the body ends the store appears at `folder`, whole, or else nothing does.

    Raises UserError for ids outside the vocabulary, a store without tokens, and a full disk.
    """
    with (
        written_aside(folder) as aside,
        fill_store(aside, vocab_size=vocab_size, end_id=end_id, tokenizer=tokenizer, source=source) as writer,
    ):
        yield writer


@contextmanager
def fill_store(
    folder: Path, *, vocab_size: int, end_id: int, tokenizer: str | None, source: str
) -> Iterator[StoreWriter]:
    """As `write_store`, for callers who write `folder` as part of a larger one that they write aside."""
    folder.mkdir(exist_ok=True)
    with (folder / TOKENS_FILE).open("wb") as stream:
        writer = StoreWriter(stream, vocab_size=vocab_size, end_id=end_id, tokenizer=tokenizer, source=source)
        yield writer
        header = writer.finish()
    (folder / HEADER_FILE).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")


def is_store(path: Path) -> bool:
    """Whether `path` is meant to be a store, whole or not: `open_store` says what is wrong with it."""
    return (path / HEADER_FILE).exists() or (path / TOKENS_FILE).exists()


def open_store(
    path: str | Path, *, vocab_size: int | None = None, tokenizer: str | None = None
) -> TokenStore:
    """Map the store at `path` (a folder). Checks the header and the file's length, and reads no token.

    vocab_size: of the model; a store with an id beyond it is refused. tokenizer: a fingerprint that the
    store's must equal if it has one.

    Raises UserError when there is no store, it is not ours, cut short, of a later version, or does not fit.
    """
    folder = Path(path)
    header = _read_header(folder)
    if vocab_size is not None and header.max_id >= vocab_size:
        raise _beyond_vocabulary(str(folder), header.max_id, vocab_size)
    if tokenizer is not None and header.tokenizer not in (None, tokenizer):
        raise UserError(
            f"token store {folder} was made with another tokenizer ({header.tokenizer}, "
            f"expected {tokenizer}); prepare the corpus again with this one"
        )
    file = folder / TOKENS_FILE
    dtype = np.dtype(header.dtype)
    try:
        size = file.stat().st_size
        if size != header.tokens * dtype.itemsize:
            raise _corrupt(
                folder, f"{TOKENS_FILE} has {size:,} bytes, expected {header.tokens * dtype.itemsize:,}"
            )
        tokens = np.memmap(file, dtype=dtype, mode="r", shape=(header.tokens,))
    except OSError as error:
        raise _corrupt(folder, f"{TOKENS_FILE} cannot be read: {error.strerror or error}") from error
    return TokenStore(folder, header, tokens)


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that `counts`, shape [vocab_size], make."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def unigram_cross_entropy(counts: NDArray[np.int64], model_counts: NDArray[np.int64]) -> float:
    """Nats per token of the tokens in `counts` under the frequencies of `model_counts`, both [vocab_size].

    One is added to every model count (Laplace), so that a token the model has never seen costs a finite sum.
    """
    log_share = np.log(model_counts + 1.0) - np.log(model_counts.sum() + len(model_counts))
    return float(-(counts * log_share).sum() / counts.sum())


def _read_header(folder: Path) -> StoreHeader:
    file = folder / HEADER_FILE
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no token store: {HEADER_FILE} is missing; make one with `ratrain data prepare`"
        ) from None
    except OSError as error:
        raise _corrupt(folder, f"{HEADER_FILE} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _corrupt(folder, f"{HEADER_FILE} is not JSON: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(
            f"{folder} is no token store: {HEADER_FILE} lacks format {FORMAT!r}; "
            f"make one with `ratrain data prepare`"
        )
    if values.get("version") != VERSION:
        raise UserError(
            f"token store {folder} has version {values.get('version')}, expected {VERSION}; "
            f"prepare it again with this version of ratrain"
        )
    known = {entry.name for entry in fields(StoreHeader)}
    if wrong := sorted(known ^ values.keys()):
        raise _corrupt(folder, f"{HEADER_FILE} has missing or unknown keys: {', '.join(wrong)}")
    header = StoreHeader(**values)
    numbers = (header.vocab_size, header.tokens, header.documents, header.max_id, header.end_id)
    if not all(type(number) is int and number >= 0 for number in numbers) or header.tokens < 1:
        raise _corrupt(folder, f"{HEADER_FILE} has counts that are no counts")
    if header.dtype not in ("<u2", "<u4") or max(header.max_id, header.end_id) >= header.vocab_size:
        raise _corrupt(folder, f"{HEADER_FILE} contradicts itself")
    return header


def _checksum(tokens: NDArray[np.unsignedinteger[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens), _CHUNK):
        digest.update(tokens[start : start + _CHUNK].tobytes())
    return digest.hexdigest()


def _corrupt(folder: Path, what: str) -> UserError:
    return UserError(
        f"token store {folder} is corrupt: {what}; delete it and run `ratrain data prepare` again"
    )


def _beyond_vocabulary(name: str, worst: int, vocab_size: int) -> UserError:
    return UserError(
        f"token id {worst} in {name} is beyond the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}); "
        f"use the tokenizer that belongs to the model, or a model with a larger vocabulary"
    )
