"""Report files appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ratrain.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Writes `text` aside, then renames it to `path`. UserError where the place cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose a folder that can be written"
        ) from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`; UserError, which calls it `what`, where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected {what}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; expected {what}")
    return data
