"""A text corpus written into token stores, whole or split into training and validation.

Written straight into their folders: the caller writes these aside and renames them when all is done."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ratrain.data.corpus import Corpus, Document
from ratrain.data.store import StoreWriter, fill_store, open_store
from ratrain.data.tokenizer import TextTokenizer, train_tokenizer
from ratrain.errors import UserError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and bytes of corpus files done and in all, about once per MB."""

TRAIN, VALIDATION = "train", "validation"

HELD_OUT_SHARE = 0.02
"""Share of documents (of tokens, where documents are too few) set aside for validation."""

TOKENIZER_SAMPLE_BYTES = 16_000_000
"""A larger corpus trains its tokenizer on a sample of about this size, chosen by hash: merges settle on far
less text than there is, and training is the one step whose memory grows with the text."""

_SAMPLE_CHUNK = 1 << 16  # characters
_ENCODE_BATCH = 1 << 22  # characters
_REPORT_EVERY = 1 << 20  # bytes
_COPY_CHUNK = 1 << 20  # tokens


def held_out(document: Document, seed: int) -> bool:
    """Whether a document is for validation: decided by its name and the seed, so that a corpus that grows
    never moves a document from one side to the other."""
    return _chance(seed, "split", document.name) < HELD_OUT_SHARE


def train_on(
    corpus: Corpus, vocab_size: int, seed: int, progress: Progress, *, wanted: Callable[[Document], bool]
) -> TextTokenizer:
    """Train a tokenizer on the wanted documents, or on a sample of them (see `TOKENIZER_SAMPLE_BYTES`)."""
    share = TOKENIZER_SAMPLE_BYTES / max(1, corpus.size)

    def texts() -> Iterator[str]:
        for document in _reported(corpus.documents(), "train tokenizer", corpus.size, progress):
            if not wanted(document):
                continue
            if share >= 1:
                yield document.text
                continue
            for number, start in enumerate(range(0, len(document.text), _SAMPLE_CHUNK)):
                if _chance(seed, "sample", f"{document.name}#{number}") < share:
                    yield document.text[start : start + _SAMPLE_CHUNK]

    return train_tokenizer(texts(), vocab_size)


def splits_by_document(corpus: Corpus, seed: int) -> bool:
    """Whether `held_out` leaves a document on both sides. Reads no further than the first of each."""
    sides = set()
    for document in corpus.documents():
        sides.add(held_out(document, seed))
        if len(sides) == 2:
            return True
    return False


def write_whole(folder: Path, corpus: Corpus, tokenizer: TextTokenizer, progress: Progress) -> None:
    """Write all of `corpus` into one store at `folder`."""
    with _store_for(folder, corpus, tokenizer) as writer:
        _write(corpus, tokenizer, progress, lambda _: writer, writer)


def write_split(
    folder: Path, corpus: Corpus, tokenizer: TextTokenizer, seed: int, progress: Progress
) -> None:
    """Write `corpus` into stores `train` and `validation` in `folder`, split by document."""
    with (
        _store_for(folder / TRAIN, corpus, tokenizer) as train,
        _store_for(folder / VALIDATION, corpus, tokenizer) as validation,
    ):
        _write(corpus, tokenizer, progress, lambda doc: validation if held_out(doc, seed) else train, train)


def write_cut(folder: Path, corpus: Corpus, tokenizer: TextTokenizer, progress: Progress) -> None:
    """Write `corpus` into stores `train` and `validation` in `folder`, the last tokens for validation: for
    corpora of so few documents that splitting by document leaves one side empty."""
    write_whole(folder / "whole", corpus, tokenizer, progress)
    whole = open_store(folder / "whole")
    cut = whole.header.tokens - max(2, int(whole.header.tokens * HELD_OUT_SHARE))
    if cut < 2:
        raise UserError(
            f"corpus {corpus.description} has {whole.header.tokens} tokens, too few to hold some out for "
            f"validation; give more text"
        )
    for name, tokens in ((TRAIN, whole.tokens[:cut]), (VALIDATION, whole.tokens[cut:])):
        with _store_for(folder / name, corpus, tokenizer) as writer:
            for start in range(0, len(tokens), _COPY_CHUNK):
                writer.add_tokens(tokens[start : start + _COPY_CHUNK])
            if name == TRAIN:
                writer.skips.update(whole.header.skips)
    shutil.rmtree(folder / "whole")


def _store_for(folder: Path, corpus: Corpus, tokenizer: TextTokenizer) -> AbstractContextManager[StoreWriter]:
    return fill_store(
        folder,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        tokenizer=tokenizer.fingerprint,
        source=corpus.description,
    )


def _write(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    progress: Progress,
    store_of: Callable[[Document], StoreWriter],
    skips_to: StoreWriter,
) -> None:
    """Encode in batches, so that the tokenizer's threads have work and memory stays bounded."""
    batch: list[Document] = []
    waiting = 0
    documents = corpus.documents(skips_to.skips)

    def flush() -> None:
        for document, ids in zip(batch, tokenizer.encode([document.text for document in batch])):
            store_of(document).add_document(ids)
        batch.clear()

    for document in _reported(documents, "tokenise", corpus.size, progress):
        batch.append(document)
        waiting += len(document.text)
        if waiting >= _ENCODE_BATCH:
            flush()
            waiting = 0
    flush()


def _reported(documents: Iterator[Document], stage: str, size: int, progress: Progress) -> Iterator[Document]:
    told = 0
    progress(stage, 0, size)
    for document in documents:
        yield document
        if document.consumed - told >= _REPORT_EVERY:
            told = document.consumed
            progress(stage, told, size)
    progress(stage, size, size)


def _chance(seed: int, purpose: str, name: str) -> float:
    """A number in [0, 1) that depends on its arguments only."""
    digest = hashlib.blake2b(f"{seed} {purpose} {name}".encode("utf-8", "surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") / 2**64
