"""What `ratrain reproduce` writes: figures as PNG, and one page with all tables and figures in it."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ratrain.errors import UserError
from ratrain.plan.reproduce.before_after import before_after
from ratrain.plan.reproduce.cells import HEADER, READINGS, Table
from ratrain.plan.reproduce.curves import Curves
from ratrain.plan.reproduce.setting import Setting
from ratrain.report import reproduction_figures as draw
from ratrain.report.files import write_whole

PAGE = "reproduce.html"

_OF_TABLE = {
    "published": ("speedups",),
    "models": ("models", "memory"),
    "ablation": ("gantt",),
    "scaling": ("scaling",),
    "correctness": ("losses",),
}
"""Figures that belong to a table."""


def write_reproduction(
    setting: Setting, tables: Sequence[Table], folder: Path, curves: Curves | None = None
) -> Path:
    """Draws the figures of `tables`, and of `curves` if runs were measured, into `folder`, then the page that holds
    tables and figures; its path. UserError where nothing can be written."""
    figures = _figures(setting, {table.name: table for table in tables})
    if curves is not None:
        figures["losses"] = draw.losses(curves)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in figures.items():
            _write_bytes(folder / f"{name}.png", image)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}); choose another --out") from None
    path = folder / PAGE
    write_whole(path, _page(setting, tables, figures))
    return path


def _figures(setting: Setting, tables: Mapping[str, Table]) -> dict[str, bytes]:
    made: dict[str, bytes | None] = {}
    if "published" in tables:
        made["speedups"] = draw.speedups(tables["published"])
    if "models" in tables:
        made["models"] = draw.models(tables["models"])
        made["memory"] = draw.memory(tables["models"], setting.budget)
    if "scaling" in tables:
        made["scaling"] = draw.scaling(tables["scaling"])
    if "ablation" in tables and setting.rows.model:
        made["gantt"] = draw.gantt(before_after(setting))
    return {name: image for name, image in made.items() if image is not None}


def _page(setting: Setting, tables: Sequence[Table], figures: Mapping[str, bytes]) -> str:
    readings = "".join(f"<li><b>{name}</b>: {escape(text)}</li>" for name, text in READINGS.items())
    body = [
        "<h1>The paper's tables beside ours</h1>",
        f"<p>Efficiency of computing, the one calibrated number: {setting.compute.efficiency:.4f}, fitted to "
        f"{escape(setting.rows.calibrating.name)}. Readings:</p><ul>{readings}</ul>",
    ]
    for table in tables:
        images = "".join(
            f'<figure><img alt="{name}" style="max-width:100%;background:#fff" src="data:image/png;base64,'
            f'{base64.b64encode(figures[name]).decode()}"></figure>'
            for name in _OF_TABLE.get(table.name, ())
            if name in figures
        )
        words = "".join(f"<li>{escape(text)}</li>" for text in table.words)
        body.append(
            f'<section><h2>{escape(table.title)}</h2>{images}{_table(table)}<ul class="soft">{words}</ul></section>'
        )
    css = files("ratrain.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>reproduce · RATrain</title><style>{css}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in cell.words()) + "</tr>"
        for cell in table.cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _write_bytes(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
