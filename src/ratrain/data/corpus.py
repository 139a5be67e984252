"""Documents out of text files, folders and JSON lines, each with a name that stays the same between runs."""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ratrain.errors import UserError

PYTHON_STDLIB = "python-stdlib"
BAD_RECORDS = frozenset({"undecodable", "broken JSON", "missing text", "corrupt file"})

_TEXT_SUFFIXES = (".py", ".txt", ".md")
_JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz")  # the last is how C4's own files are named
_TEXT_KEY = "text"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """One text to learn from. `name` is its file's path below the corpus, and `:line` for JSON lines.

    `consumed` counts the bytes of corpus files read up to and including this document (compressed bytes
    where the file is), for showing progress against `Corpus.size`.
    """

    text: str
    name: str
    consumed: int


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus in reading order.

    root: what document names are relative to. tolerated: reasons for which a bad record is passed over.
    """

    description: str
    root: Path
    files: tuple[Path, ...]
    tolerated: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Bytes of all files, as they lie on disk."""
        return sum(_stat_size(file) for file in self.files)

    def fingerprint(self) -> str:
        """Hex digest of the names and contents of all files, the same on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            name = self._name(file).encode("utf-8", "surrogateescape")
            digest.update(b"%d %b %d\n" % (len(name), name, _stat_size(file)))
            try:
                with file.open("rb") as stream:
                    while piece := stream.read(1 << 20):
                        digest.update(piece)
            except OSError as error:
                raise _unreadable(file, error) from error
        return digest.hexdigest()

    def documents(self, skips: Counter[str] | None = None) -> Iterator[Document]:
        """Yield every document that holds text, in order. What is passed over is counted in `skips`.

        Empty and whitespace-only documents are always passed over. Undecodable bytes, broken JSON and
        records without a text raise UserError with file, line and byte unless `tolerated`.
        A corpus in which no document is left raises UserError.
        """
        skips = Counter() if skips is None else skips
        before, found = 0, False
        for file in self.files:
            read = _read_json_lines if _is_json_lines(file) else _read_text
            try:
                for record in read(file):
                    try:
                        text = record.text()
                    except _BadRecord as bad:
                        if bad.reason not in self.tolerated:
                            raise bad.as_user_error(file) from None
                        skips[bad.reason] += 1
                        continue
                    if not text.strip():
                        skips["empty"] += 1
                        continue
                    found = True
                    suffix = f":{record.line}" if _is_json_lines(file) else ""
                    yield Document(text, self._name(file) + suffix, before + record.consumed)
            except OSError as error:
                raise _unreadable(file, error) from error
            before += _stat_size(file)
        if not found:
            passed = ", ".join(f"{count} {reason}" for reason, count in sorted(skips.items())) or "none"
            raise UserError(
                f"corpus {self.description} holds no text (passed over: {passed}); "
                f"give it at least one document"
            )

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def find_corpus(corpus: str | Path, *, skip_bad: bool = False) -> Corpus:
    """The files behind a corpus name: a text or JSON-lines file, a folder of them, or `python-stdlib`.

    A folder is searched recursively in sorted order for *.py, *.txt, *.md, *.jsonl, *.jsonl.gz and
    *.json.gz; hidden files and folders are left out. A single file may have any name; *.json, *.jsonl and
    their .gz are read as JSON lines with the text under "text", everything else as one text.
    skip_bad: pass over every kind of bad record.

    Raises UserError when nothing is there or nothing in it can be read.
    """
    path = Path(corpus)
    tolerated = BAD_RECORDS if skip_bad else frozenset()
    try:
        if str(corpus) == PYTHON_STDLIB:
            return _python_stdlib()
        if path.is_dir():
            files = _files_below(path, _TEXT_SUFFIXES + _JSON_LINES_SUFFIXES)
            if not files:
                kinds = " ".join("*" + suffix for suffix in _TEXT_SUFFIXES + _JSON_LINES_SUFFIXES)
                raise UserError(f"corpus folder {path} holds no text file; expected some of {kinds}")
            return Corpus(str(path), path, files, tolerated)
        if path.is_file():
            return Corpus(str(path), path.parent, (path,), tolerated)
    except OSError as error:
        raise _unreadable(Path(error.filename or path), error) from error
    raise UserError(
        f"corpus {path} does not exist; give a text file, a folder of text files, a .jsonl or .jsonl.gz "
        f"file, a prepared folder, or {PYTHON_STDLIB}"
    )


def read_documents(
    path: str | Path, *, skip_bad: bool = False, skips: Counter[str] | None = None
) -> Iterator[Document]:
    """The documents of a corpus: `find_corpus` then `Corpus.documents`, which say what is raised when."""
    return find_corpus(path, skip_bad=skip_bad).documents(skips)


def _python_stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = _files_below(
        root, (".py",), leave_out=frozenset({"site-packages", "dist-packages", "__pycache__"})
    )
    if not files:
        raise UserError(
            f"corpus {PYTHON_STDLIB}: no *.py file in {root}; use another Python or another corpus"
        )
    # A handful of the library's own tests are written in other encodings on purpose, to test the decoder:
    # they are no sign of a damaged corpus.
    return Corpus(PYTHON_STDLIB, root, files, tolerated=frozenset({"undecodable"}))


def _files_below(
    folder: Path, suffixes: tuple[str, ...], leave_out: frozenset[str] = frozenset()
) -> tuple[Path, ...]:
    """Files with these suffixes in `folder` and its subfolders, but not in hidden or left-out ones."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        found.extend(
            Path(parent, name) for name in names if name.endswith(suffixes) and not name.startswith(".")
        )
    # Part by part, without regard to the locale: the same order on every machine.
    return tuple(sorted(found, key=lambda file: file.parts))


def _raise(error: OSError) -> None:
    """os.walk passes over folders that it cannot list, unless told otherwise: text would be lost unsaid."""
    raise error


class _BadRecord(Exception):
    """A record that holds no text: `reason` is what skips are counted under."""

    def __init__(self, reason: str, line: int, what: str) -> None:
        super().__init__(what)
        self.reason, self.line, self.what = reason, line, what

    def as_user_error(self, file: Path) -> UserError:
        return UserError(
            f"{file}, line {self.line}: {self.what}; mend it, or pass over such records "
            "(data.skip_bad = true, --skip-bad)"
        )


@dataclass(frozen=True)
class _Record:
    """Raw bytes of one document, decoded late so that a bad one does not end the reading of its file."""

    raw: bytes
    line: int
    consumed: int
    offset: int  # of raw in the (uncompressed) file
    is_json: bool
    fault: str | None = None  # the file itself is broken here

    def text(self) -> str:
        if self.fault:
            raise _BadRecord("corrupt file", self.line, self.fault)
        try:
            text = self.raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.raw.count(b"\n", 0, error.start)
            raise _BadRecord(
                "undecodable",
                line,
                f"byte 0x{self.raw[error.start]:02X} at offset {self.offset + error.start} is not UTF-8 "
                f"({error.reason}), expected UTF-8 text",
            ) from None
        return self._text_of_json(text) if self.is_json and text.strip() else text

    def _text_of_json(self, line: str) -> str:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadRecord("broken JSON", self.line, f"not valid JSON ({error})") from None
        if not isinstance(value, dict) or not isinstance(value.get(_TEXT_KEY), str):
            raise _BadRecord(
                "missing text", self.line, f'expected an object with a string under "{_TEXT_KEY}"'
            )
        text: str = value[_TEXT_KEY]
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, UTF-8 cannot
            raise _BadRecord("undecodable", self.line, "a lone surrogate is not a character") from None
        return text


def _read_text(file: Path) -> Iterator[_Record]:
    raw = file.read_bytes()
    bom = len(_BOM) if raw.startswith(_BOM) else 0
    yield _Record(raw[bom:], 1, len(raw), bom, is_json=False)


def _read_json_lines(file: Path) -> Iterator[_Record]:
    with file.open("rb") as stored:
        stream = gzip.GzipFile(fileobj=stored) if file.name.endswith(".gz") else stored
        line, offset = 0, 0
        while True:
            line += 1
            try:
                raw = stream.readline()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                fault = f"the gzip data is cut short or damaged ({error})"
                yield _Record(b"", line, _stat_size(file), offset, is_json=True, fault=fault)
                return
            if not raw:
                return
            bom = len(_BOM) if line == 1 and raw.startswith(_BOM) else 0
            yield _Record(raw[bom:], line, stored.tell(), offset + bom, is_json=True)
            offset += len(raw)


def _is_json_lines(file: Path) -> bool:
    return file.name.endswith((*_JSON_LINES_SUFFIXES, ".json"))


def _stat_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(
        f"corpus file {file} cannot be read ({error.strerror or error}); check its path and permissions"
    )
