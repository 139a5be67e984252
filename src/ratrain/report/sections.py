"""The sections of a report page below its Gantt chart, each a function to HTML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from ratrain.config import format_bytes
from ratrain.program.action import Kind
from ratrain.report.account import Account, seconds
from ratrain.report.charts import Bar, Curve, bar_chart, line_chart, smoothed
from ratrain.report.compare import Miss
from ratrain.report.places import Place
from ratrain.report.run_folder import RunFolder
from ratrain.report.steps import Step

_RANKS = 32
"""Ranks above which a chart keeps, of each stage, only the rank that was worst."""

_LEGEND = {
    "FORWARD": (Kind.FORWARD,),
    "BACKWARD": (Kind.BACKWARD,),
    "RECOVER": (Kind.RECOVER,),
    "SEND/RECV_ACT": (Kind.SEND_ACT, Kind.RECV_ACT),
    "SEND/RECV_GRAD": (Kind.SEND_GRAD, Kind.RECV_GRAD),
    "GRAD_SYNC": (Kind.GRAD_SYNC,),
    "TIED_SYNC": (Kind.TIED_SYNC,),
    "GRAD_NORM": (Kind.GRAD_NORM,),
    "UPDATE_SHARD": (Kind.UPDATE_SHARD,),
    "PREFETCH_VIEW": (Kind.PREFETCH_VIEW,),
}


class Memory(NamedTuple):
    """Peak bytes of one rank, and what it was forecast and allowed; None where unknown."""

    place: Place
    measured: int | None
    forecast: int | None
    budget: int | None

    @property
    def peak(self) -> int | None:
        """Measured where there is a measurement, else forecast."""
        return self.forecast if self.measured is None else self.measured


def tiles(entries: Iterable[tuple[str, str]]) -> str:
    """Numbers at a glance: (number, what it is)."""
    inner = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(what)}</span></div>'
        for number, what in entries
    )
    return f'<div class="tiles">{inner}</div>'


def kinds_legend(used: Collection[Kind]) -> str:
    """Colours of the kinds of action in `used`, and the hatching of waits."""
    entries = [(name, kinds[0].value) for name, kinds in _LEGEND.items() if set(kinds) & set(used)]
    inner = "".join(_key(name, f"var(--{kind})") for name, kind in entries)
    waits = (
        '<span><i class="wait"></i>waiting</span><span><i class="wait idle"></i>idle, nothing awaited</span>'
    )
    return f'<div class="legend">{inner}{waits}</div>'


def exposure(
    measured: Step | None, forecast: Step | None, places: Sequence[Place], forecast_places: Sequence[Place]
) -> str:
    """Exposed time per rank by cause, mean over ranks first; the forecast's thinner beneath."""
    main = measured or forecast
    if main is None:
        return ""
    second = forecast if measured is not None else None
    order = list(dict.fromkeys([*main.causes, *(second.causes if second else ())]))
    bars = _exposed_bars(
        "mean", main.causes, main.exposed[0], main.time, order, second.causes if second else None
    )
    twins = {(p.stage, p.replica): p.rank for p in forecast_places}
    known = [p for p in places if p.rank in main.accounts]
    shown = _worst(known, lambda p: main.accounts[p.rank].exposed)
    for place in shown:
        entry = main.accounts[place.rank]
        rank = twins.get((place.stage, place.replica), twins.get((place.stage, 0)))
        twin = second.accounts.get(rank) if second and rank is not None else None
        bars += _exposed_bars(
            _label(place), entry.causes, entry.exposed, entry.step, order, twin.causes if twin else None
        )
    legend = "".join(_key(cause, f"var(--{cause})") for cause in order)
    mean, most = main.exposed
    text = (
        f"Of the step shown, less FORWARD and BACKWARD: {seconds(mean)} on average, {seconds(most)} at worst."
    )
    text += _left_out(known, shown) + (" Thin bars: the forecast." if second else "")
    return _section(
        "Exposed time by cause", text, f'<div class="legend">{legend}</div>' + bar_chart(bars, seconds)
    )


def memory(entries: Sequence[Memory]) -> str:
    """Peak memory per rank against forecast and budget."""
    known = [e for e in entries if e.peak is not None]
    if not known:
        return ""
    by_place = {e.place: e for e in known}
    shown = _worst(list(by_place), lambda p: by_place[p].peak or 0)
    bars = []
    for place in shown:
        entry = by_place[place]
        peak = entry.peak or 0
        over = entry.budget is not None and peak > entry.budget
        note = format_bytes(peak) + (f" ({peak / entry.budget:.0%})" if entry.budget else "")
        name, colour = ("measured", "accent") if entry.measured is not None else ("forecast", "accent")
        bars.append(Bar(_label(place), [(name, peak, f"var(--{'bad' if over else colour})")], note))
        if entry.measured is not None and entry.forecast is not None:
            off = f"forecast {format_bytes(entry.forecast)} ({entry.forecast / entry.measured - 1:+.1%})"
            bars.append(Bar("", [("forecast", entry.forecast, "var(--accent)")], off, second=True))
    budgets = {e.budget for e in known if e.budget is not None}
    markers = {"budget": float(min(budgets))} if len(budgets) == 1 else {}
    both = any(e.measured is not None and e.forecast is not None for e in known)
    text = "Peak bytes of each process" + (", the forecast's thinner beneath." if both else ".")
    return _section("Memory", text + _left_out(list(by_place), shown), bar_chart(bars, format_bytes, markers))


def comparison(measured: Step, forecast: Step, off: Sequence[Miss]) -> str:
    """Forecast and measurement side by side, and the three actions where the forecast was furthest off."""
    rows = [("step time", forecast.time, measured.time)]
    for name, told, took in (
        ("exposed", forecast.exposed, measured.exposed),
        ("tail", forecast.tail, measured.tail),
    ):
        rows += [(f"{name}, {part}", a, b) for part, a, b in zip(("mean", "max"), told, took)]
    causes = dict.fromkeys([*measured.causes, *forecast.causes])
    rows += [
        (f"exposed on {cause}, mean", forecast.causes.get(cause, 0.0), measured.causes.get(cause, 0.0))
        for cause in causes
    ]
    body = [
        [escape(name), seconds(told), seconds(took), _difference(told, took, forecast.time)]
        for name, told, took in rows
    ]
    table = _table(["", "forecast", "measured", "difference"], body)
    text = f"A step was forecast to take {seconds(forecast.time)} and took {seconds(measured.time)} "
    text += f"({measured.time / forecast.time - 1:+.1%})."
    worst = [
        [
            f"<code>{escape(str(miss.action))}</code>",
            f"rank {miss.place.rank}",
            seconds(miss.forecast),
            seconds(miss.measured),
            f"{_signed(miss.total)} ({miss.count})",
        ]
        for miss in off[:3]
    ]
    found = _table(["furthest off", "where", "forecast", "measured", "in all of its sort there"], worst)
    return _section(
        "Forecast against measurement", text, f'<div class="pair"><div>{table}</div><div>{found}</div></div>'
    )


def curves(run: RunFolder, account: Account) -> str:
    """Loss over the steps, then speed, gradient norm and learning rate."""

    def points(key: str) -> list[tuple[float, float]]:
        return [(float(u["step"]), float(u[key])) for u in run.updates if u.get(key) is not None]

    loss = points("loss")
    if not loss:
        return ""
    lines = [Curve("loss", loss, "var(--accent)", faint=len(loss) > 40)]
    if len(loss) > 40:
        lines.append(Curve("smoothed", smoothed(loss, max(2, len(loss) // 60)), "var(--accent)"))
    legend = _key("training loss" + (", smoothed" if len(loss) > 40 else ""), "var(--accent)")
    if run.evaluations:
        found = [(float(e["step"]), float(e["eval_loss"])) for e in run.evaluations]
        lines.append(Curve("validation loss", found, "var(--SEND_GRAD)", dots=True))
        legend += _key("validation loss", "var(--SEND_GRAD)")
    entropy = account.unigram_entropy
    references = {} if entropy is None else {"unigram entropy": entropy}
    big = line_chart(lines, references, width=1400, height=300, show="{:.2f}".format)
    small = [
        _figure(name, line_chart([Curve(name, points(key), colour)], width=460, height=170, show=show))
        for key, name, colour, show in (
            ("tokens_per_s", "tokens/s", "var(--UPDATE_SHARD)", "{:,.0f}".format),
            ("grad_norm", "gradient norm", "var(--RECOVER)", "{:.3g}".format),
            ("lr", "learning rate", "var(--SEND_ACT)", "{:.2g}".format),
        )
        if points(key)
    ]
    row = f'<div class="three">{"".join(small)}</div>'
    return _section("Loss", "Nats per target token.", f'<div class="legend">{legend}</div>{big}{row}')


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{caption}</figcaption>{chart}</figure>"


def _exposed_bars(
    label: str,
    causes: Mapping[str, float],
    exposed: float,
    step: float,
    order: Sequence[str],
    second: Mapping[str, float] | None,
) -> list[Bar]:
    note = f"{seconds(exposed)} ({exposed / step:.0%})"
    bars = [Bar(label, _parts(causes, order), note, strong=label == "mean")]
    if second is not None:
        bars.append(Bar("", _parts(second, order), f"forecast {seconds(sum(second.values()))}", second=True))
    return bars


def _parts(causes: Mapping[str, float], order: Sequence[str]) -> list[tuple[str, float, str]]:
    return [(c, causes[c], f"var(--{c})") for c in order if causes.get(c)]


def _worst(places: Sequence[Place], key: Callable[[Place], float]) -> list[Place]:
    if len(places) <= _RANKS:
        return list(places)
    worst: dict[int, Place] = {}
    for place in places:
        if place.stage not in worst or key(place) > key(worst[place.stage]):
            worst[place.stage] = place
    return [worst[stage] for stage in sorted(worst)]


def _left_out(known: Sequence[Place], shown: Sequence[Place]) -> str:
    return f" Of {len(known)} ranks, each stage's worst." if len(shown) < len(known) else ""


def _label(place: Place) -> str:
    part = "" if place.part is None else f" p{place.part}"
    return f"rank {place.rank} (s{place.stage} r{place.replica}{part})"


def _key(name: str, colour: str) -> str:
    return f'<span><i style="--colour:{colour}"></i>{escape(name)}</span>'


def _difference(told: float, took: float, step: float) -> str:
    share = f" ({took / told - 1:+.1%})".replace("-", "−") if told > 0.01 * step else ""
    return _signed(took - told) + share


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "−") + seconds(abs(value))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; columns after the first that start with a digit or sign are set right."""

    def css(column: int) -> str:
        cells = [row[column] for row in rows]
        return ' class="number"' if column and all(c[:1].isdigit() or c[:1] in "+−" for c in cells) else ""

    kinds = [css(i) for i in range(len(header))]
    head = "".join(f"<th{k}>{escape(h)}</th>" for h, k in zip(header, kinds))
    body = "".join("<tr>" + "".join(f"<td{k}>{c}</td>" for c, k in zip(row, kinds)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _section(title: str, text: str, inner: str) -> str:
    return f'<section><h2>{title}</h2><p class="soft">{escape(text)}</p>{inner}</section>'
