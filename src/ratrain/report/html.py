"""`report.html`: a run, or a simulation, on one page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ratrain.config import format_bytes
from ratrain.program.program import STREAMS
from ratrain.report.account import Account, account_of, seconds, words
from ratrain.report.files import write_whole
from ratrain.report.forecast import Forecast
from ratrain.report.gantt import gantt
from ratrain.report.places import Place
from ratrain.report.run_folder import RunFolder, read_run
from ratrain.report.sections import (
    Memory,
    comparison,
    curves,
    exposure,
    kinds_legend,
    memory,
    tiles,
)
from ratrain.report.steps import Step, steps_of, typical

_SCRIPTS = ("gantt_data.js", "gantt_draw.js", "gantt_pointer.js")


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder and returns its path. UserError if it is not a run folder."""
    run = read_run(folder)
    account = account_of(run)
    path = folder / "report.html"
    write_whole(path, _page(run.name, _run_body(run, account)))
    return path


def write_simulation(forecast: Forecast, path: Path, title: str = "simulation", words: str = "") -> None:
    """Writes the page of a forecast alone: the step it expects, exposed time and memory per rank."""
    step = typical(steps_of(forecast.timeline))
    entries = [Memory(p, None, forecast.peak_of(p), forecast.budget_bytes) for p in forecast.places]
    body = [f"<h1>{escape(title)}</h1>", _paragraphs([words] if words else [])]
    body.append(tiles(_step_tiles(step)) if step else "")
    if step is not None:
        body.append(_gantt({"forecast": step}, {"forecast": forecast.places}))
        body.append(_pair(exposure(None, step, forecast.places, forecast.places), memory(entries)))
    write_whole(path, _page(title, body))


def _run_body(run: RunFolder, account: Account) -> list[str]:
    steps: dict[str, Step] = {}
    places: dict[str, Sequence[Place]] = {}
    if account.forecast is not None and run.forecast is not None:
        steps["forecast"], places["forecast"] = account.forecast, run.forecast.places
    if account.step is not None:
        steps["measured"], places["measured"] = account.step, run.places
    body = [f"<h1>{escape(run.name)}</h1>", _paragraphs(words(run, account)), tiles(_run_tiles(account))]
    if steps:
        body.append(_gantt(steps, places))
    peaks: list[int | None] = [*run.peaks] if len(run.peaks) == len(run.places) else [None] * len(run.places)
    entries = [Memory(*entry) for entry in zip(run.places, peaks, run.forecast_peaks, run.budgets)]
    if account.forecast is not None and account.step is not None:
        body.append(comparison(account.step, account.forecast, account.misses))
    shown = exposure(account.step, account.forecast, run.places, places.get("forecast", ()))
    body.append(_pair(shown, memory(entries)))
    body.append(curves(run, account))
    if run.config:
        config = f"<details><summary>run.toml</summary><pre>{escape(run.config)}</pre></details>"
        body.append(f"<section>{config}</section>")
    return body


def _run_tiles(account: Account) -> list[tuple[str, str]]:
    entries = []
    if account.step_time is not None:
        entries.append((seconds(account.step_time), "step time, median"))
        if account.tokens_per_s is not None:
            entries.append((f"{account.tokens_per_s:,.0f}", "tokens/s"))
        if account.exposed is not None:
            mean, most = (value / account.step_time for value in account.exposed)
            entries.append((f"{mean:.0%}", f"exposed on average, {most:.0%} at worst"))
        if account.tail is not None:
            entries.append((seconds(account.tail[0]), f"tail, {seconds(account.tail[1])} at worst"))
    if account.peak_bytes is not None:
        of = f"peak memory of {format_bytes(account.budget_bytes)}" if account.budget_bytes else "peak memory"
        entries.append((format_bytes(account.peak_bytes), of))
    if account.eval_loss is not None:
        entries.append((f"{account.eval_loss:.3f}", "validation loss"))
    elif account.loss is not None:
        entries.append((f"{account.loss:.3f}", "training loss"))
    return entries


def _step_tiles(step: Step) -> list[tuple[str, str]]:
    mean, most = (value / step.time for value in step.exposed)
    return [
        (seconds(step.time), "step time, forecast"),
        (f"{mean:.0%}", f"exposed on average, {most:.0%} at worst"),
        (seconds(step.tail[0]), f"tail, {seconds(step.tail[1])} at worst"),
    ]


def _gantt(steps: Mapping[str, Step], places: Mapping[str, Sequence[Place]]) -> str:
    data = gantt(dict(steps), dict(places))
    used = {row.action.kind for step in steps.values() for rows in step.rows.values() for row in rows}
    both = len(steps) > 1
    counted = {name: f" step {step.number + 1}" if name == "measured" else "" for name, step in steps.items()}
    which = " and ".join(name + number for name, number in counted.items()).capitalize()
    notes = sorted({entry["note"] for entry in data["sets"] if entry["note"]})
    sources = _buttons("source", ["both", *steps] if both else [])
    controls = [
        sources,
        _buttons("streams", ["compute", "all"], {"compute": "compute stream", "all": "all streams"}),
        _buttons("zoom", ["in", "out", "all"], {"in": "+", "out": "−", "all": "whole step"}, toggle=False),
        '<span class="soft">drag to zoom, double-click for the whole step, shift+wheel to pan; hover to see '
        "what was waited for</span>",
    ]
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<section id="gantt"><h2>Where the time went</h2><p class="soft">{escape(which)}'
        f"{escape(''.join(f', {note}' for note in notes))}. Solid bars are work, hatched ones waiting, "
        "in the colour of what was awaited; numbers are micro-batches. Bold ticks bound the step on each "
        "rank, from its first FORWARD to its next; what belongs to a neighbouring step is pale. "
        f"Thin rows are the other streams: {', '.join(STREAMS[1:])}.</p>"
        f'<div class="bar">{"".join(controls)}</div>{kinds_legend(used)}'
        '<div class="chart"><canvas tabindex="0" role="img" aria-label="Gantt chart of one training step">'
        '</canvas><div class="tip" hidden></div></div></section>'
        f'<script type="application/json" id="gantt-data">{text}</script>'
        f'<script type="module">{"".join(map(_asset, _SCRIPTS))}</script>'
    )


def _buttons(
    key: str, values: Sequence[str], labels: Mapping[str, str] | None = None, toggle: bool = True
) -> str:
    names = labels or {}
    pressed = ' aria-pressed="false"' if toggle else ""
    inner = "".join(
        f'<button type="button" data-{key}="{value}"{pressed}>{names.get(value, value)}</button>'
        for value in values
    )
    return f'<span class="group">{inner}</span>' if inner else ""


def _pair(*sections: str) -> str:
    return f'<div class="pair">{"".join(sections)}</div>'


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _page(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · RATrain</title><style>{_asset('report.css')}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("ratrain.report").joinpath(name).read_text(encoding="utf-8")
