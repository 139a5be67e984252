"""The account of a run: what was trained, how fast, and where the time went, in numbers and in words."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ratrain.config import format_bytes
from ratrain.report.compare import Miss, misses
from ratrain.report.run_folder import RunFolder
from ratrain.report.steps import Step, steps_of, typical


@dataclass(frozen=True)
class Account:
    """Seconds, bytes and tokens of a run; medians over its updates, None where it did not say.

    exposed, tail, causes   seconds per step: (mean, max) over ranks; by cause the mean over ranks
    step, forecast          the measured and forecast step that the pictures show
    misses                  where the forecast was off, the furthest first
    """

    updates: int
    tokens: int
    loss: float | None
    eval_loss: float | None
    unigram_entropy: float | None
    step_time: float | None
    tokens_per_s: float | None
    exposed: tuple[float, float] | None
    tail: tuple[float, float] | None
    causes: Mapping[str, float]
    peak_bytes: int | None
    budget_bytes: int | None
    step: Step | None
    forecast: Step | None
    misses: Sequence[Miss]

    def to_json(self) -> dict[str, Any]:
        """The numbers as plain values, the forecast's beside them."""
        skipped = ("step", "forecast", "misses")
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        if self.forecast is not None:
            data["forecast"] = {
                "step_time": self.forecast.time,
                "exposed": self.forecast.exposed,
                "tail": self.forecast.tail,
                "causes": self.forecast.causes,
            }
            data["furthest_off"] = [
                {
                    "action": str(m.action),
                    "rank": m.place.rank,
                    "measured": m.measured,
                    "forecast": m.forecast,
                    "total": m.total,
                    "count": m.count,
                }
                for m in self.misses[:3]
            ]
        return data


def account_of(run: RunFolder) -> Account:
    """The account of `run`. Where metrics lack a number, the traced steps supply it."""
    steps = steps_of(run.timeline) if run.timeline else []
    step = typical(steps)
    forecast = typical(steps_of(run.forecast.timeline)) if run.forecast else None
    off = (
        misses(step, forecast, run.places, run.forecast.places) if step and forecast and run.forecast else ()
    )
    updates = run.updates
    step_time = _median([u.get("step_time_s") for u in updates])
    tokens_per_s = _median([u.get("tokens_per_s") for u in updates])
    budgets = [b for b in run.budgets if b is not None]
    by_cause = [u["exposed_by_cause"] for u in updates if u.get("exposed_by_cause")]
    causes = {
        c: _median([table.get(c, 0.0) for table in by_cause]) or 0.0 for table in by_cause for c in table
    }
    return Account(
        updates=len(updates),
        tokens=sum(u.get("target_tokens") or 0 for u in updates),
        loss=updates[-1].get("loss") if updates else None,
        eval_loss=run.evaluations[-1]["eval_loss"] if run.evaluations else None,
        unigram_entropy=run.about.get("unigram_entropy"),
        step_time=step_time if step_time is not None or step is None else step.time,
        tokens_per_s=tokens_per_s,
        exposed=_pair(updates, "exposed_s") or (step.exposed if step else None),
        tail=_pair(updates, "tail_s") or (step.tail if step else None),
        causes=dict(sorted(causes.items(), key=lambda c: -c[1])) or (step.causes if step else {}),
        peak_bytes=max(run.peaks, default=None),
        budget_bytes=min(budgets, default=None),
        step=step,
        forecast=forecast,
        misses=off,
    )


def words(run: RunFolder, account: Account) -> list[str]:
    """The account as sentences, one paragraph each."""
    layout = layout_words(run.about, len(run.places))
    first = f"{account.tokens:,} target tokens in {account.updates:,} updates"
    first += f" on {layout}." if layout else "."
    passes = run.about.get("passes")
    if passes is not None:
        first += f" Passes: {', '.join(passes) or 'none (baseline 1F1B)'}."
    paragraphs = [first]
    if account.loss is not None:
        learnt = f"Training loss ended at {account.loss:.3f}"
        if account.eval_loss is not None:
            learnt += f", validation loss at {account.eval_loss:.3f}"
            if account.unigram_entropy is not None:
                gap = account.unigram_entropy - account.eval_loss
                side = "below" if gap >= 0 else "above"
                learnt += f", {abs(gap):.2f} nat {side} the corpus's unigram entropy"
        paragraphs.append(learnt + ".")
    if account.step_time is not None:
        paragraphs.append(_speed(account, account.step_time))
    return paragraphs


def layout_words(plan: Mapping[str, Any], ranks: int) -> str:
    """The layout of `plan` (the object in plan.json) in a phrase; the number of ranks where there is none."""
    if "layers" not in plan or "data" not in plan:
        return f"{ranks} ranks" if ranks else ""
    stages, replicas = len(plan["layers"]), plan["data"]
    parts = [f"{_count(stages, 'stage')} × {_count(replicas, 'replica')}"]
    if plan.get("tensor", 1) > 1:
        parts = [f"{parts[0]} × {_count(plan['tensor'], 'tensor rank')}"]
    runs = [(n, len(list(same))) for n, same in itertools.groupby(plan["layers"])]
    parts.append("layers " + " + ".join(f"{times}×{n}" if times > 1 else str(n) for n, times in runs))
    if "zero" in plan:
        parts.append(f"ZeRO-{plan['zero']}")
    if "global_batch" in plan and "micro_batch" in plan:
        parts.append(_count(plan["global_batch"] // (plan["micro_batch"] * replicas), "micro-batch", "es"))
    if "rungs" in plan:
        rungs = Counter(rung for stage in plan["rungs"] for rung in stage)
        dropped = ", ".join(f"{rung} on {_count(n, 'block')}" for rung, n in rungs.items() if rung != "keep")
        parts.append(f"recovery {dropped}" if dropped else "no recovery")
    return ", ".join(parts)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def seconds(value: float) -> str:
    """A duration for people: 3 significant digits in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f} {unit}" if abs(scaled) >= 100 else f"{scaled:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _speed(account: Account, step_time: float) -> str:
    text = f"A step took {seconds(step_time)} (median)"
    if account.tokens_per_s is not None:
        text += f", {account.tokens_per_s:,.0f} tokens/s"
    if account.exposed is not None:
        mean, most = account.exposed
        text += (
            f"; {mean / step_time:.0%} of it was exposed on average, {most / step_time:.0%} on the worst rank"
        )
        if account.causes:
            cause, share = next(iter(account.causes.items()))
            text += f", most of it on {cause} ({seconds(share)})"
    if account.tail is not None:
        text += f". Tail {seconds(account.tail[0])}, at worst {seconds(account.tail[1])}"
    if account.peak_bytes is not None:
        text += f". Peak memory {format_bytes(account.peak_bytes)}"
        if account.budget_bytes is not None:
            text += f" of {format_bytes(account.budget_bytes)}"
    return text + "."


def _pair(updates: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float] | None:
    mean = _median([(u.get(key) or {}).get("mean") for u in updates])
    most = _median([(u.get(key) or {}).get("max") for u in updates])
    return None if mean is None or most is None else (mean, most)


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
