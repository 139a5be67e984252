"""What a checkpoint says of itself, and which checkpoints a folder holds. No torch: it is read before launch."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ratrain.errors import UserError

VERSION = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
"""Suffix of a checkpoint that is still being written."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of.

    step         updates run, skipped ones included
    sequences    data position: sequences of the global order already trained on
    applied      updates applied, AdamW's own step count
    rule         state of the step rule (schedule position, loss scale)
    shapes       parameter name to shape
    run          settings that must agree to go on: seq_len, global_batch, seed, data
    layout       the layout that wrote it, for people
    tensor       tensor ranks, each of which wrote its own part of what they cut
    files        name to size in bytes of every other file
    """

    step: int
    sequences: int
    applied: int
    rule: dict[str, float]
    shapes: dict[str, list[int]]
    run: dict[str, Any]
    layout: str
    tensor: int = 1
    files: dict[str, int] = field(default_factory=dict)
    version: int = VERSION


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints under `folder`, oldest first."""
    if not folder.is_dir():
        return []
    names = [p for p in folder.iterdir() if p.name.startswith("step-") and not p.name.endswith(PARTIAL)]
    return sorted(p for p in names if (p / MANIFEST).is_file())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its files checked for presence and size. UserError if it is not whole."""
    try:
        data = json.loads((folder / MANIFEST).read_text())
        if data.get("version") != VERSION:
            raise UserError(f"{folder}: checkpoint version {data.get('version')!r}, expected {VERSION}")
        manifest = Manifest(**data)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: not a checkpoint (no {MANIFEST}); expected one like RUN/checkpoints/step-00000010"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: {MANIFEST} cannot be read ({error}); name another checkpoint") from None
    for name, size in manifest.files.items():
        path = folder / name
        have = path.stat().st_size if path.is_file() else None
        if have != size:
            state = "is missing" if have is None else f"has {have} bytes of {size}"
            raise UserError(f"{path} {state}: the checkpoint is damaged; name an older one with --resume")
    return manifest


def check_fits(
    manifest: Manifest,
    folder: Path,
    shapes: dict[str, list[int]],
    run: dict[str, Any],
    tensor: int | None = None,
) -> None:
    """Raises UserError, before anything is loaded, if the checkpoint is of another model or run, or was written by
    another number of tensor ranks than `tensor` (None: any)."""
    if tensor not in (None, manifest.tensor):
        raise UserError(
            f"{folder}: written by {manifest.tensor} tensor ranks, this run has {tensor}; set parallel.tensor back, "
            "or export the model and start from it (model.config)"
        )
    for name in sorted(shapes.keys() ^ manifest.shapes.keys()):
        where = "the model" if name in shapes else "the checkpoint"
        raise UserError(f"{folder}: {name} is only in {where}; resume with the model that wrote it")
    for name, shape in shapes.items():
        if manifest.shapes[name] != list(shape):
            raise UserError(f"{folder}: {name} is {manifest.shapes[name]} there, {list(shape)} in the model")
    for key, value in run.items():
        if manifest.run.get(key) != value:
            raise UserError(
                f"{folder}: written with {key} = {manifest.run.get(key)!r}, this run has {value!r}; the data "
                f"position would be wrong; set it back, or start afresh with --resume never or another --out"
            )


def publish(partial: Path, final: Path, keep: int) -> None:
    """Gives a whole checkpoint its final name, then removes what it makes obsolete: checkpoints of later
    steps (an earlier attempt's: this run has gone back behind them) and all but the newest `keep`."""
    replaced = final.with_name(f"{final.name}.replaced{PARTIAL}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    known = complete(final.parent)
    place = known.index(final) + 1
    for old in [*known[place:], *known[: max(place - keep, 0)]]:
        shutil.rmtree(old)


def sweep(folder: Path) -> None:
    """Removes what an interrupted save left behind."""
    for path in folder.glob(f"step-*{PARTIAL}") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, with the sizes of the files that are there, as the last file."""
    files = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
    data = asdict(manifest) | {"files": files}
    with (folder / MANIFEST).open("w") as out:
        json.dump(data, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
