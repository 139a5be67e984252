"""Folders appear whole or not at all: written beside their place under a passing name, then renamed."""

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratrain.errors import UserError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_ENTRY = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; rename it to `folder` if the body succeeds, delete it if not.

    An existing `folder` is replaced. Of two writers at once the last wins, and no reader meets half of
    either: on Linux open memory maps outlive the files' names.

    Raises UserError when the place cannot be written or the disk is full.
    """
    aside = _beside(folder, "partial")
    try:
        aside.mkdir(parents=True)
        yield aside
        _replace(aside, folder)
    except OSError as error:
        if (explained := _explain(error, folder, aside)) is None:
            raise
        raise explained from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _replace(aside: Path, folder: Path) -> None:
    """Rename `aside` to `folder`. A folder that is not empty cannot be renamed over, so it moves away."""
    while True:
        try:
            aside.replace(folder)
            return
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        replaced = _beside(folder, "replaced")
        try:
            folder.replace(replaced)
        except FileNotFoundError:
            continue  # another writer has just moved it away
        shutil.rmtree(replaced, ignore_errors=True)


def _beside(folder: Path, role: str) -> Path:
    return folder.parent / f".{folder.name}.{role}-{uuid.uuid4().hex[:12]}"


def _explain(error: OSError, folder: Path, aside: Path) -> UserError | None:
    if error.errno in _NO_SPACE:
        written = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
        place = aside if aside.exists() else folder.parent
        free = f"{shutil.disk_usage(place).free:,}" if place.exists() else "none"
        return UserError(
            f"no space left to write {folder}: it needs more than the {written:,} bytes written so far, "
            f"free are {free}; free some space or choose another folder"
        )
    if error.errno in _NO_ENTRY:
        return UserError(f"cannot write {folder} ({error.strerror}); choose a folder that can be written")
    if error.errno == errno.ENOENT and str(error.filename).startswith(str(aside)):
        return UserError(f"{folder} was removed while it was being written; leave it alone and start again")
    return None
