"""Rows as text: for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from race.arena import LOOPBACK, WARM_STEPS
from race.results import Result
from race.rows import RATRAIN, Case, Row
from race.verdict import checks, fits, loss_difference, ratio, reference_name, valid

_HEADER = (
    "contender",
    "layout",
    "s/step",
    "windows",
    "RATrain / it",
    "processor s/step",
    "peak MB",
    "loss difference",
)


def markdown(row: Row, result: Result) -> str:
    """One row as a section: a table of contenders, then what was asked."""
    lines = [f"### {row.name}", "", f"{_sentence(row)}", ""]
    lines += [line(_HEADER), line(["---"] * len(_HEADER))]
    lines += [line(_contender(row, result, case)) for case in row.cases]
    asked = checks(row, result)
    lines += ["", *(f"- {check}" for check in asked)] if asked else []
    return "\n".join([*lines, ""])


def _sentence(row: Row) -> str:
    model, case = row.cases[0].model, row.cases[0]
    shape = f"hidden {model.hidden}, {model.layers} layers, vocabulary {model.vocab:,}, sequences of {model.seq_len}"
    where = "loopback" if row.link == LOOPBACK else f"{row.link} links"
    limit = f", {case.memory} a device" if case.memory else ""
    clip = f", clipping at {case.clip:g}" if case.clip else ""
    return (
        f"{row.about[0].upper()}{row.about[1:]}. {shape}; {case.global_batch} sequences a step in micro-batches of "
        f"{case.micro_batch}; {where}{limit}{clip}; windows of {row.steps} steps."
    )


def _contender(row: Row, result: Result, case: Case) -> list[str]:
    record, reference = result.records[case.name], result.records[reference_name(row, result)]
    name = f"**{case.name}**" if case.tool == RATRAIN else case.name
    if record.error or not record.windows:
        return [name, layout(case), f"cannot run: {record.error}".replace("|", "/"), *[""] * 5]
    spread = f"{min(record.windows):.3f} to {max(record.windows):.3f}"
    difference = loss_difference(record, reference, WARM_STEPS + row.steps)
    against = ""
    if record is not reference and not reference.error:
        got, low, high = ratio(reference, record)
        against = (
            f"{got:.3f} ({low:.3f} to {high:.3f})" if valid(row, result, case) else "not the same training"
        )
    peak = " ".join(f"{p / 1e6:.0f}" for p in record.peak)
    return [
        name,
        layout(case),
        f"{median(record.windows):.3f}",
        spread,
        against,
        f"{median(record.processor):.3f}",
        peak + ("" if fits(case, record) else " (over the limit)"),
        f"{difference:.1e}",
    ]


def layout(case: Case) -> str:
    """E.g. `P=2 (5+3) D=2 ZeRO-1 recompute`."""
    words = [f"P={case.pipeline}"] if case.pipeline > 1 else []
    words += ["(" + "+".join(map(str, case.layers)) + ")"] if case.pipeline > 1 else []
    words += [f"D={case.data}"] if case.data > 1 else []
    has_levels = case.tool in (RATRAIN, "deepspeed-zero") and case.data > 1
    words += [f"ZeRO-{case.zero}"] if has_levels else []
    words += [str(case.options["over"])] if "over" in case.options else []
    if "reshard" in case.options:
        words.append(f"reshard {'on' if case.options['reshard'] else 'off'}")
    if case.recover != "keep":
        words.append(f"recover {case.recover}" if case.tool == RATRAIN else "checkpoint")
    return " ".join(words) or "1 process"


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
