"""Reading documents: what is yielded, what is counted, what is refused and with which words."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from ratrain.data.corpus import find_corpus, read_documents
from ratrain.errors import UserError


def texts(path: Path, **options: bool) -> list[str]:
    return [document.text for document in read_documents(path, **options)]


def jsonl(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def record(text: str) -> bytes:
    return json.dumps({"text": text, "url": "u"}).encode()


def test_folder_is_read_in_sorted_order_and_hidden_files_stay_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "a/c.md", ".hidden/x.py", "a/.secret.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "d.jsonl").write_bytes(jsonl(record("one"), record("two")))
    documents = list(read_documents(tmp_path))
    assert [document.name for document in documents] == [
        "a/c.md",
        "a/d.jsonl:1",
        "a/d.jsonl:2",
        "a/z.py",
        "b.txt",
    ]
    assert documents[-1].consumed == find_corpus(tmp_path).size


def test_a_single_file_of_any_name_is_one_text_with_its_line_ends_kept(tmp_path: Path) -> None:
    (tmp_path / "corpus.dat").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert texts(tmp_path / "corpus.dat") == ["a\r\nb\n"]


@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json.gz", "part.jsonl.gz"])
def test_gzipped_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(jsonl(record("one"), record("zwei ü"))))
    assert texts(tmp_path / name) == texts(tmp_path) == ["one", "zwei ü"]


def test_empty_documents_are_counted_and_bom_tolerated(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + jsonl(record(""), record(" \n\t"), b"", record("text")))
    skips: Counter[str] = Counter()
    documents = list(read_documents(file, skips=skips))
    assert [document.name for document in documents] == ["c.jsonl:4"]
    assert skips == {"empty": 3}


BAD_LINES = {
    "undecodable": (b'{"text": "\xe6"}', "byte 0xE6 at offset 33 is not UTF-8"),
    "broken JSON": (b'{"text": "a"', "not valid JSON"),
    "missing text": (b'{"txt": "a"}', 'expected an object with a string under "text"'),
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_refused_with_its_place_or_skipped_and_counted(tmp_path: Path, reason: str) -> None:
    bad, message = BAD_LINES[reason]
    file = tmp_path / "c.jsonl"
    good = b'{"text": "first line"}\n'
    file.write_bytes(good + bad + b"\n" + good)
    with pytest.raises(UserError) as caught:
        list(read_documents(file))
    assert str(caught.value).startswith(f"{file}, line 2: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)

    skips: Counter[str] = Counter()
    assert len(list(read_documents(file, skip_bad=True, skips=skips))) == 2
    assert skips == {reason: 1}


@pytest.mark.parametrize("line", [b'{"text": "\\ud800"}', b"[1]", b'{"text": 3}', b"[" * 100_000])
def test_other_lines_that_hold_no_text(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "c.jsonl").write_bytes(jsonl(record("ok"), line))
    with pytest.raises(UserError, match="line 2"):
        texts(tmp_path)
    assert texts(tmp_path, skip_bad=True) == ["ok"]


def test_undecodable_text_file_names_line_and_offset(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbffine\nfine\nbad \xff here\n")
    with pytest.raises(UserError, match=r"a\.txt, line 3: byte 0xFF at offset 17 "):
        texts(file)


def test_a_gzip_file_cut_short_is_refused_where_it_breaks(tmp_path: Path) -> None:
    # Text that does not compress, so that the cut falls behind some whole lines.
    lines = [record(f"{n * 7919 % 10007:x}" * 50) for n in range(2000)]
    whole = gzip.compress(jsonl(*lines))
    (tmp_path / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"c\.jsonl\.gz, line \d+: the gzip data is cut short or damaged"):
        texts(tmp_path)
    skips: Counter[str] = Counter()
    kept = list(read_documents(tmp_path, skip_bad=True, skips=skips))
    assert 0 < len(kept) < 2000 and skips == {"corrupt file": 1}


def test_text_named_gz_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl.gz").write_bytes(record("plain"))
    with pytest.raises(UserError, match="gzip"):
        texts(tmp_path)


def test_missing_and_empty_corpora(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        texts(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no text file"):
        texts(tmp_path)
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(UserError, match=r"holds no text .*1 empty"):
        texts(tmp_path)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt cannot be read"):
        texts(tmp_path)


def test_fingerprint_follows_names_and_contents_only(tmp_path: Path) -> None:
    for folder, name, text in (
        ("1", "a.txt", "x"),
        ("2", "a.txt", "x"),
        ("3", "a.txt", "y"),
        ("4", "b.txt", "x"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    prints = [find_corpus(tmp_path / str(number)).fingerprint() for number in (1, 2, 3, 4)]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_the_standard_library_is_at_hand() -> None:
    corpus = find_corpus("python-stdlib")
    names = {file.relative_to(corpus.root).as_posix() for file in corpus.files}
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert corpus.size > 5_000_000
    assert sum(1 for _ in corpus.documents()) > 500  # undecodable test fixtures do not stop it
