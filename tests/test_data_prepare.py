"""Preparing a corpus: split, cache, statistics, and ready stores used where they lie."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ratrain.data import tokenise
from ratrain.data.prepare import Prepared, prepare
from ratrain.data.store import StoreHeader, StoreWriter, open_store, write_store
from ratrain.data.tokenizer import load_tokenizer
from ratrain.errors import UserError

VOCAB = 280


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number:03}.txt").write_text(f"document {number} counts to {number * number}\n")
    (folder / "empty.txt").write_text("")
    return folder


def run(corpus: str | Path, tmp_path: Path, validation: Path | None = None, **options: object) -> Prepared:
    arguments = {"tokenizer": None, "vocab_size": VOCAB, "out_dir": tmp_path / "cache"} | options
    return prepare(corpus, validation, **arguments)  # type: ignore[arg-type]


def documents(store: Path, tokenizer: Path | None) -> list[str]:
    """The texts of a store, by its end tokens."""
    assert tokenizer is not None
    opened, backend = open_store(store), load_tokenizer(tokenizer).backend
    ends = np.flatnonzero(opened.tokens == opened.header.end_id)
    starts = [0, *(ends[:-1] + 1)]
    return [backend.decode(opened.tokens[a:b].tolist()) for a, b in zip(starts, ends)]


def test_documents_are_split_and_none_is_lost(corpus: Path, tmp_path: Path) -> None:
    prepared = run(corpus, tmp_path)
    assert prepared.validation is not None and not prepared.reused
    train = documents(prepared.train, prepared.tokenizer)
    validation = documents(prepared.validation, prepared.tokenizer)
    written = [file.read_text() for file in sorted(corpus.iterdir()) if file.stat().st_size]
    assert sorted(train + validation) == sorted(written)
    assert [text for text in written if text in set(train)] == train  # in order
    assert 0 < len(validation) < 20

    statistics = prepared.statistics
    assert (statistics.train_documents, statistics.validation_documents) == (len(train), len(validation))
    assert statistics.skips == {"empty": 1}
    assert statistics.train_tokens == open_store(prepared.train).header.tokens
    assert 0 < statistics.unigram_entropy < np.log(VOCAB)
    assert statistics.validation_unigram_loss == pytest.approx(statistics.unigram_entropy, abs=0.5)
    assert json.loads((prepared.train.parent / "prepared.json").read_text())["vocab_size"] <= VOCAB


def test_the_split_depends_on_names_and_seed_only(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path)
    for number in range(200, 300):
        (corpus / f"{number}.txt").write_text(f"document {number} counts to {number * number}\n")
    grown = run(corpus, tmp_path)
    assert first.validation and grown.validation
    before = set(documents(first.validation, first.tokenizer))
    after = set(documents(grown.validation, grown.tokenizer))
    assert before <= after
    other = run(corpus, tmp_path, seed=1)
    assert other.validation
    assert set(documents(other.validation, other.tokenizer)) != after


def test_a_second_run_finds_the_first_and_a_damaged_cache_is_made_anew(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path)
    stages: list[str] = []
    second = run(corpus, tmp_path, progress=lambda stage, done, total: stages.append(stage))
    assert second.reused and not stages
    assert (second.train, second.statistics) == (first.train, first.statistics)
    tokens = (first.train / "tokens.bin").read_bytes()
    (first.train / "tokens.bin").write_bytes(tokens[:-2])
    third = run(corpus, tmp_path)
    assert not third.reused and (third.train / "tokens.bin").read_bytes() == tokens
    (corpus / "000.txt").write_text("changed")
    assert run(corpus, tmp_path).train != first.train


def test_two_caches_of_one_corpus_are_equal_byte_by_byte(corpus: Path, tmp_path: Path) -> None:
    first, second = run(corpus, tmp_path), run(corpus, tmp_path, out_dir=tmp_path / "elsewhere")
    for file in first.train.parent.rglob("*"):
        other = second.train.parent / file.relative_to(first.train.parent)
        assert file.is_dir() or file.read_bytes() == other.read_bytes()


def test_one_document_holds_out_its_last_tokens(tmp_path: Path) -> None:
    text = "".join(f"line {n} of one long text\n" for n in range(2000))
    (tmp_path / "book.txt").write_text(text)
    prepared = run(tmp_path / "book.txt", tmp_path)
    assert prepared.validation and prepared.tokenizer
    whole = np.concatenate([open_store(prepared.train).tokens, open_store(prepared.validation).tokens])
    assert load_tokenizer(prepared.tokenizer).backend.decode(whole[:-1].tolist()) == text
    share = prepared.statistics.validation_tokens / len(whole)
    assert share == pytest.approx(0.02, abs=0.001)
    assert sorted(entry.name for entry in prepared.train.parent.iterdir()) == [
        "prepared.json",
        "tokenizer",
        "train",
        "validation",
    ]


def test_a_corpus_too_small_to_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="has 2 tokens, too few"):
        run(tmp_path / "a.txt", tmp_path)
    assert not list((tmp_path / "cache").iterdir())


def test_validation_and_tokenizer_of_ones_own(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path)
    (tmp_path / "held.txt").write_text("document 1 counts to 1\n")
    assert first.tokenizer
    prepared = run(corpus, tmp_path, tmp_path / "held.txt", tokenizer=first.tokenizer)
    assert prepared.validation
    assert documents(prepared.validation, prepared.tokenizer) == ["document 1 counts to 1\n"]
    assert prepared.statistics.train_documents == 200


def test_prepared_folders_and_stores_are_used_where_they_lie(corpus: Path, tmp_path: Path) -> None:
    made = run(corpus, tmp_path)
    folder = made.train.parent
    assert made.validation and made.tokenizer
    for corpus_given, validation_given, tokenizer_given in (
        (folder, None, None),
        (folder, folder, None),
        (made.train, made.validation, made.tokenizer),
    ):
        used = run(corpus_given, tmp_path / "unused", validation_given, tokenizer=tokenizer_given)
        assert used.reused and used.statistics == made.statistics
        assert (used.train, used.validation, used.tokenizer) == (made.train, made.validation, made.tokenizer)
    bare = run(made.train, tmp_path / "unused")
    assert (bare.validation, bare.tokenizer) == (None, None)
    assert bare.statistics.validation_unigram_loss is None
    assert not (tmp_path / "unused").exists()

    with pytest.raises(UserError, match="one is tokenised and the other is text"):
        run(folder, tmp_path, corpus)
    (folder / "train" / "store.json").unlink()
    with pytest.raises(UserError, match="no token store"):
        run(made.train, tmp_path)


def test_stores_that_do_not_belong_together(corpus: Path, tmp_path: Path) -> None:
    made = run(corpus, tmp_path)
    with write_store(tmp_path / "s", vocab_size=10**6, end_id=0, tokenizer=None, source="x") as writer:
        writer.add_document(np.array([999_999]))
    with pytest.raises(UserError, match="token id 999999"):
        run(made.train, tmp_path, tmp_path / "s")
    other = run(corpus, tmp_path, vocab_size=VOCAB - 10)
    with pytest.raises(UserError, match="another tokenizer"):
        run(made.train, tmp_path, other.validation)
    with pytest.raises(UserError, match="another tokenizer"):
        run(made.train, tmp_path, made.validation, tokenizer=other.tokenizer)


def test_bad_documents_stop_everything_or_are_counted(corpus: Path, tmp_path: Path) -> None:
    (corpus / "bad.txt").write_bytes(b"\xe6")
    with pytest.raises(UserError, match=r"bad\.txt, line 1"):
        run(corpus, tmp_path)
    assert not list((tmp_path / "cache").iterdir())
    assert run(corpus, tmp_path, skip_bad=True).statistics.skips == {"empty": 1, "undecodable": 1}


def test_a_full_disk_names_the_cache_and_leaves_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> StoreHeader:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StoreWriter, "finish", full)
    with pytest.raises(UserError, match=r"no space left to write .*/cache/\w+: it needs more than the [1-9]"):
        run(corpus, tmp_path)
    assert not list((tmp_path / "cache").iterdir())


def test_progress_ends_at_the_size_of_the_corpus(corpus: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    run(corpus, tmp_path, progress=lambda *call: calls.append(call))
    size = sum(file.stat().st_size for file in corpus.iterdir())
    for stage in ("train tokenizer", "tokenise"):
        told = [(done, total) for name, done, total in calls if name == stage]
        assert told[0] == (0, size) and told[-1] == (size, size)


def test_a_large_corpus_trains_its_tokenizer_on_a_sample(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[int] = []

    def train_tokenizer(texts, vocab_size):  # type: ignore[no-untyped-def]
        kept = list(texts)
        sampled.append(sum(map(len, kept)))
        return real(kept, vocab_size)

    real = tokenise.train_tokenizer
    monkeypatch.setattr(tokenise, "train_tokenizer", train_tokenizer)
    monkeypatch.setattr(tokenise, "TOKENIZER_SAMPLE_BYTES", 2000)
    prepared = run(corpus, tmp_path)
    assert 1000 < sampled[0] < 3000
    assert prepared.statistics.train_documents > 150  # all of the text is tokenised nevertheless


def test_the_standard_library_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's path on a small part of the library, so that the test stays quick."""
    root = tmp_path / "lib"
    shutil.copytree(Path(json.__file__).parent, root / "json")
    shutil.copytree(root / "json", root / "site-packages" / "json")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    prepared = run("python-stdlib", tmp_path, vocab_size=300)
    statistics = prepared.statistics
    assert statistics.skips == {"undecodable": 1}
    assert statistics.train_documents + statistics.validation_documents in (5, 6)
    assert statistics.vocab_size == 300


def test_readers_import_neither_torch_nor_tokenizers() -> None:
    """Ranks only map a store: what is heavy stays with the process that prepares."""
    code = "import sys, ratrain.data.sampler; print({'torch', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
