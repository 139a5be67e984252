"""The token store: what was written is what is read, and what is not ours is refused by name."""

import errno
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratrain.data.store import (
    HEADER_FILE,
    TOKENS_FILE,
    StoreHeader,
    open_store,
    unigram_cross_entropy,
    write_store,
)
from ratrain.errors import UserError


def write(folder: Path, documents: list[list[int]], vocab_size: int = 10, end_id: int = 2) -> Path:
    with write_store(folder, vocab_size=vocab_size, end_id=end_id, tokenizer="T", source="here") as writer:
        for ids in documents:
            writer.add_document(np.array(ids, dtype=np.int64))
        writer.skips["empty"] += 3
    return folder


def test_documents_are_joined_with_an_end_token_and_described(tmp_path: Path) -> None:
    store = open_store(write(tmp_path / "s", [[5, 6], [7], [5]]), vocab_size=10, tokenizer="T")
    assert store.tokens.tolist() == [5, 6, 2, 7, 2, 5, 2]
    assert not store.tokens.flags.writeable
    header = store.header
    assert (header.tokens, header.documents, header.max_id, header.dtype) == (7, 3, 7, "<u2")
    assert (header.source, header.skips) == ("here", {"empty": 3})
    share = np.array([2, 1, 1, 3]) / 7
    assert header.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())
    assert store.counts().tolist() == [0, 0, 3, 0, 0, 2, 1, 1, 0, 0]
    store.verify()


def test_many_documents_pass_through_the_buffer_unchanged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 70_000, size=400_000) for _ in range(7)]
    with write_store(tmp_path / "s", vocab_size=70_000, end_id=0, tokenizer=None, source="x") as writer:
        for ids in documents:
            writer.add_document(ids)
    store = open_store(tmp_path / "s")
    assert store.header.dtype == "<u4"
    np.testing.assert_array_equal(store.tokens, np.concatenate([[*ids, 0] for ids in documents]))
    store.verify()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_the_smallest_type_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    store = open_store(write(tmp_path / "s", [[vocab_size - 1]], vocab_size))
    assert store.header.dtype == dtype and store.tokens[0] == vocab_size - 1


def test_opening_reads_no_token_and_takes_no_time(tmp_path: Path) -> None:
    write(tmp_path / "s", [[5] * 5_000_000])
    open_store(tmp_path / "s")
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        open_store(tmp_path / "s")
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "s", [[7]])
    open_store(tmp_path / "s", vocab_size=8)
    with pytest.raises(UserError, match=r"token id 7 .* vocabulary of 7 "):
        open_store(tmp_path / "s", vocab_size=7)
    for bad in (10, -1):
        with pytest.raises(UserError, match=f"token id {bad} .* vocabulary of 10 "):
            write(tmp_path / "t", [[1, bad, 3]])
    assert [folder.name for folder in tmp_path.iterdir()] == ["s"]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "s", [[7]])
    with pytest.raises(UserError, match="another tokenizer"):
        open_store(tmp_path / "s", tokenizer="U")


def test_damage_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", [[5, 6, 7]])
    tokens = folder / TOKENS_FILE
    whole = tokens.read_bytes()

    tokens.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"corrupt: tokens\.bin has 7 bytes, expected 8"):
        open_store(folder)
    tokens.write_bytes(whole[:-1] + b"\xff")
    with pytest.raises(UserError, match="not what was written"):
        open_store(folder).verify()
    tokens.unlink()
    with pytest.raises(UserError, match=r"corrupt: tokens\.bin cannot be read"):
        open_store(folder)


HEADERS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is not JSON"),
    "foreign": ({"format": "other"}, "no token store"),
    "a list": ([], "no token store"),
    "later": ({"version": 99}, "version 99, expected 1"),
    "key missing": ({"max_id": None}, "missing or unknown keys: max_id"),
    "key unknown": ({"color": "red"}, "missing or unknown keys: color"),
    "wrong type": ({"tokens": "many"}, "counts that are no counts"),
    "no tokens": ({"tokens": 0}, "counts that are no counts"),
    "wrong dtype": ({"dtype": "<f4"}, "contradicts itself"),
    "max beyond": ({"max_id": 10}, "contradicts itself"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_are_not_ours(tmp_path: Path, case: str) -> None:
    change, message = HEADERS[case]
    file = write(tmp_path / "s", [[5]]) / HEADER_FILE
    if isinstance(change, dict):
        values = json.loads(file.read_text()) | change
        file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    else:
        file.write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(UserError, match=message) as caught:
        open_store(tmp_path / "s")
    assert str(tmp_path / "s") in str(caught.value) and "\n" not in str(caught.value)


def test_no_store_and_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token store"):
        open_store(tmp_path / "nothing")
    with pytest.raises(UserError, match="gives no token"):
        write(tmp_path / "s", [])
    with pytest.raises(UserError, match="end token id 10 is beyond"):
        write(tmp_path / "s", [[1]], end_id=10)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_and_the_old_store_in_place(tmp_path: Path) -> None:
    write(tmp_path / "s", [[5]])
    with (
        pytest.raises(UserError, match=r"no space left to write .*s: it needs more than the 2,000,\d+ bytes"),
        write_store(tmp_path / "s", vocab_size=10, end_id=2, tokenizer=None, source="x") as writer,
    ):
        stream = writer._stream
        writer.add_document(np.full(1_000_000, 6))
        writer.add_document(np.full(1_000_000, 7))
        stream.truncate(2_000_002)

        class Full:
            def write(self, raw: bytes) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        writer._stream = Full()  # type: ignore[assignment]
        writer.add_document(np.full(2_000_000, 7))
    assert open_store(tmp_path / "s").tokens.tolist() == [5, 2]
    assert [folder.name for folder in tmp_path.iterdir()] == ["s"]


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        write_store(tmp_path / "s", vocab_size=10, end_id=2, tokenizer=None, source="x") as writer,
    ):
        writer.add_document(np.array([1]))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "file" / "s", [[1]])


def test_rewriting_replaces_whole_folders_and_open_maps_live_on(tmp_path: Path) -> None:
    old = open_store(write(tmp_path / "s", [[5]]))
    write(tmp_path / "s", [[6, 7]])
    assert open_store(tmp_path / "s").tokens.tolist() == [6, 7, 2]
    assert old.tokens.tolist() == [5, 2]


def test_cross_entropy_of_unseen_tokens_is_finite() -> None:
    seen = np.array([6, 2, 0])
    assert unigram_cross_entropy(np.array([0, 0, 5]), seen) == pytest.approx(np.log(11))
    assert unigram_cross_entropy(np.array([1, 0, 0]), seen) == pytest.approx(np.log(11 / 7))


def test_the_header_is_a_plain_value(tmp_path: Path) -> None:
    header = open_store(write(tmp_path / "s", [[5]])).header
    assert header == StoreHeader(**json.loads((tmp_path / "s" / HEADER_FILE).read_text()))
