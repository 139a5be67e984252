"""From what a user hands over to token stores that ranks can map: tokenizer, split, tokenise, cache.

A prepared folder holds `tokenizer/`, `train/`, `validation/` and `prepared.json`, which describes them. It is
named by a fingerprint of all that decides its contents, so that a second run finds it, and a changed corpus,
tokenizer or seed makes another.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ratrain.data.aside import written_aside
from ratrain.data.corpus import find_corpus
from ratrain.data.store import TokenStore, is_store, open_store, unigram_cross_entropy
from ratrain.data.tokenise import (
    TRAIN,
    VALIDATION,
    Progress,
    held_out,
    splits_by_document,
    train_on,
    write_cut,
    write_split,
    write_whole,
)
from ratrain.data.tokenizer import load_tokenizer, save_tokenizer
from ratrain.errors import UserError

_DESCRIPTION_FILE = "prepared.json"
_TOKENIZER = "tokenizer"
_RECIPE = 1  # raise it when the same inputs give other stores than before


@dataclass(frozen=True)
class Statistics:
    """What is known of prepared data. Entropies are in nats per token."""

    vocab_size: int
    end_id: int
    train_tokens: int
    train_documents: int
    validation_tokens: int
    validation_documents: int
    unigram_entropy: float
    """Of the training tokens: the loss of a model that knows token frequencies and nothing else."""
    validation_unigram_loss: float | None
    """Cross-entropy of the validation tokens under the training tokens' frequencies."""
    skips: dict[str, int]
    """Documents passed over, by reason."""


@dataclass(frozen=True)
class Prepared:
    """Where the data lies, and what is known of it."""

    train: Path
    validation: Path | None
    """None only where a token store was handed over without another for validation."""
    tokenizer: Path | None
    """What `AutoTokenizer` loads, to be copied into an export; None where a token store came without."""
    statistics: Statistics
    reused: bool
    """Whether nothing had to be written."""


def prepare(
    corpus: str | Path,
    validation: str | Path | None,
    tokenizer: str | Path | None,
    vocab_size: int,
    out_dir: str | Path,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    skip_bad: bool = False,
) -> Prepared:
    """Make `corpus` ready to train on; what has to be written goes below the cache folder `out_dir`.

    corpus, validation: a text or JSON-lines file, a folder of them, `python-stdlib`; or a token store or
    prepared folder, which are used where they lie. Without `validation`, about 2 % of the documents are held
    out, chosen by a hash of their names; where that leaves one side empty, the last 2 % of the tokens.
    tokenizer: a Hugging Face folder or tokenizer.json; None trains one of `vocab_size` on the training part.
    seed: of the split and of the tokenizer's sample; keep it fixed between runs that are to be compared.
    skip_bad: pass over and count undecodable, broken and textless records instead of refusing them.

    Stores that are found are read once and compared with their checksums. Raises UserError as the readers,
    the tokenizer and the store do.
    """
    given = [corpus] if validation is None else [corpus, validation]
    ready = [_is_ready(Path(source)) for source in given]
    if all(ready):
        return _use(Path(corpus), None if validation is None else Path(validation), tokenizer)
    if any(ready):
        raise UserError(
            f"corpus {corpus} and validation {validation}: one is tokenised and the other is text; "
            f"prepare the text with the same tokenizer first, then give both prepared"
        )
    return _make(
        corpus, validation, tokenizer, vocab_size, Path(out_dir), seed, progress or _silent, skip_bad
    )


def _make(
    corpus: str | Path,
    validation: str | Path | None,
    tokenizer: str | Path | None,
    vocab_size: int,
    out_dir: Path,
    seed: int,
    progress: Progress,
    skip_bad: bool,
) -> Prepared:
    text = find_corpus(corpus, skip_bad=skip_bad)
    held_out_text = None if validation is None else find_corpus(validation, skip_bad=skip_bad)
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    decides = (
        _RECIPE,
        text.fingerprint(),
        held_out_text and held_out_text.fingerprint(),
        loaded.fingerprint if loaded else vocab_size,
        seed,
        skip_bad,
    )
    folder = out_dir / hashlib.blake2b(repr(decides).encode(), digest_size=8).hexdigest()
    if (folder / _DESCRIPTION_FILE).is_file():
        try:
            return _use(folder, None, None)
        except UserError:
            pass  # the cache is ours, and damaged: make it anew

    by_document = held_out_text is None and splits_by_document(text, seed)
    with written_aside(folder) as aside:
        chosen = loaded or train_on(
            text, vocab_size, seed, progress, wanted=lambda doc: not (by_document and held_out(doc, seed))
        )
        save_tokenizer(chosen, aside / _TOKENIZER, like=tokenizer)
        if held_out_text is not None:
            write_whole(aside / TRAIN, text, chosen, progress)
            write_whole(aside / VALIDATION, held_out_text, chosen, progress)
        elif by_document:
            write_split(aside, text, chosen, seed, progress)
        else:
            write_cut(aside, text, chosen, progress)
        statistics = _statistics(open_store(aside / TRAIN), open_store(aside / VALIDATION))
        description = json.dumps(asdict(statistics), indent=1) + "\n"
        (aside / _DESCRIPTION_FILE).write_text(description, encoding="utf-8")
    return Prepared(folder / TRAIN, folder / VALIDATION, folder / _TOKENIZER, statistics, reused=False)


def _use(corpus: Path, validation: Path | None, tokenizer: str | Path | None) -> Prepared:
    """Ready stores as they are, checked against each other, the tokenizer and their checksums."""
    is_prepared = (corpus / _DESCRIPTION_FILE).is_file()
    train = corpus / TRAIN if is_prepared else corpus
    if validation is None:
        validation = corpus / VALIDATION if is_prepared else None
    elif (validation / _DESCRIPTION_FILE).is_file():
        validation = validation / VALIDATION
    if tokenizer is None and is_prepared:
        tokenizer = corpus / _TOKENIZER
    fingerprint = None if tokenizer is None else load_tokenizer(tokenizer).fingerprint

    train_store = open_store(train, tokenizer=fingerprint)
    train_store.verify()
    validation_store = None
    if validation is not None:
        expected = fingerprint or train_store.header.tokenizer
        validation_store = open_store(
            validation, vocab_size=train_store.header.vocab_size, tokenizer=expected
        )
        validation_store.verify()
    return Prepared(
        train,
        validation,
        None if tokenizer is None else Path(tokenizer),
        _statistics(train_store, validation_store),
        reused=True,
    )


def _is_ready(path: Path) -> bool:
    return (path / _DESCRIPTION_FILE).is_file() or is_store(path)


def _statistics(train: TokenStore, validation: TokenStore | None) -> Statistics:
    header = train.header
    skips = dict(header.skips)
    loss = None
    if validation is not None:
        for reason, count in validation.header.skips.items():
            skips[reason] = skips.get(reason, 0) + count
        counts, model_counts = validation.counts(), train.counts()
        loss = unigram_cross_entropy(counts, model_counts)
    return Statistics(
        vocab_size=header.vocab_size,
        end_id=header.end_id,
        train_tokens=header.tokens,
        train_documents=header.documents,
        validation_tokens=validation.header.tokens if validation else 0,
        validation_documents=validation.header.documents if validation else 0,
        unigram_entropy=header.unigram_entropy,
        validation_unigram_loss=loss,
        skips=skips,
    )


def _silent(stage: str, done: int, total: int) -> None:
    """The progress of a caller that wants none."""
