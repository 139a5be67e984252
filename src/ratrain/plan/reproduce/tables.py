"""The paper's tables beside ours, a function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ratrain.config import format_bytes
from ratrain.errors import UserError
from ratrain.plan.fit import fits, with_memory
from ratrain.plan.plan import Plan
from ratrain.plan.recipes import NAMES, RATRAIN, RECIPES
from ratrain.plan.reproduce.cells import Cell, Table
from ratrain.plan.reproduce.rows import ModelRow, StepRow
from ratrain.plan.reproduce.scaling import scaling
from ratrain.plan.reproduce.setting import Setting, describe, step_of
from ratrain.plan.reproduce.trivial import trivial_step
from ratrain.plan.simulated import with_time
from ratrain.program.passes import PASSES

PAPERS = "paper"
"""The recipe that is the paper's own schedule."""

OF_PEAK = ", peak"
"""Ends the quantity of a recipe's peak; that of its step is the recipe's name."""


def published(setting: Setting) -> Table:
    """Every published step, then what the paper's schedule gains over each baseline of the same row."""
    rows = setting.rows
    readings = {row.name: setting.readings(row) for row in rows.step}
    steps: dict[str, Cell] = {}
    for row in rows.step:
        plan, times = setting.plan_of(row), _steps(readings[row.name])
        cell = _step_cell(row.name, "step", plan, row.step(rows.sequence), row.reading)
        if not row.calibrates:
            off = trivial_step(setting, row) / row.step(rows.sequence)
            cell = replace(cell, note=f"{cell.note}; trivial model {off:.3f}")
        steps[row.name] = _ranged(cell, times)
    cells = list(steps.values())
    for row in rows.step:
        own = next((r for r in rows.step if r.recipe == PAPERS and _same_work(r, row)), None)
        if own is None or row.recipe == PAPERS:
            continue
        mine, other = steps[own.name], steps[row.name]
        assert mine.paper is not None and other.paper is not None
        gain = None if mine.ours is None or other.ours is None else other.ours / mine.ours
        what = f"{row.model}, RATrain over {row.recipe}"
        cell = Cell(what, "speed-up", "x", gain, other.paper / mine.paper, row.reading)
        if own.degrees == row.degrees:  # one depth for both, whatever it is
            depths = {plan.pipeline: step_of(plan) or 0.0 for plan in readings[own.name]}
            gains = [
                (step_of(p) or 0.0) / depths[p.pipeline] for p in readings[row.name] if p.pipeline in depths
            ]
        else:
            gains = [step / mine.ours for step in _steps(readings[row.name]) if mine.ours]
        cells.append(_ranged(cell, gains))
    words = [f"{row.name}: {row.assumed}" for row in rows.step if row.assumed]
    words.append(
        "Trivial model: one rate and the 1F1B bubble of equal stages, fitted to the same row; its ratio."
    )
    return Table("published", "Published steps, and the gain over each baseline", tuple(cells), tuple(words))


def models(setting: Setting) -> Table:
    """All models under every recipe."""
    cells = []
    for row in setting.rows.model:
        for name in NAMES:
            cells += _recipe_cells(setting, row, name)
        freedom: Mapping[str, dict[str, int | None]] = {
            "ZeRO-2, any P": {"zero": 2, "tensor": 1},
            "any layout": {},
        }
        for what, degrees in freedom.items():
            plan = setting.plan(RATRAIN, row.model, row.devices, row.global_batch, **degrees)
            cells += _step_and_peak(row.model, f"ratrain, {what}", plan, "predicted")
    cells.sort(key=lambda cell: cell.unit == "bytes")  # steps of all models, then peaks
    words = [f"{row.model}: {row.devices} clusters, {row.assumed}" for row in setting.rows.model]
    words += [f"{name}: {fixed.summary}" for name, fixed in RECIPES.items()]
    return Table("models", "Every recipe on every model", tuple(cells), tuple(words))


def ablation(setting: Setting) -> Table:
    """The paper's schedule with each lifecycle pass off, and with all: step and tail over those with all on."""
    cells = []
    for row in setting.rows.model:
        plan = setting.plan(PAPERS, row.model, row.devices, row.global_batch, pipeline=row.pipeline, tensor=1)
        if plan.forecast is None or not plan.forecast.step or not plan.forecast.tail:
            continue  # does not fit, or nothing is exposed
        where = f"{row.model}, {describe(plan)}"
        off: Mapping[str, tuple[str, ...]] = {
            **{f"without {name}": tuple(p for p in plan.passes if p != name) for name in plan.passes},
            "without any": (),
        }
        cells.append(Cell(where, "step, all passes", "s", plan.forecast.step, None, "assumed"))
        cells.append(Cell(where, "tail, all passes", "s", plan.forecast.tail, None, "assumed"))
        for name, passes in off.items():
            without = with_memory(plan.with_(passes=passes), setting.spec(row.model))
            note = "" if fits(without) else f"needs {format_bytes(_peak(without))}"
            timed = with_time(without, setting.spec(row.model), setting.compute).forecast
            assert timed is not None and timed.step is not None and timed.tail is not None
            step = timed.step / plan.forecast.step
            cells.append(Cell(where, f"{name}: step", "x", step, None, "assumed", note=note))
            cells.append(Cell(where, f"{name}: tail", "x", timed.tail / plan.forecast.tail, None, "assumed"))
    words = ["The paper's numbers of this table are not known to us.", f"Passes: {', '.join(PASSES)}."]
    return Table("ablation", "Each lifecycle pass off", tuple(cells), tuple(words))


def memory(setting: Setting) -> Table:
    """Peaks at the published fewest clusters, and the fewest (of powers of two) that hold the model here."""
    cells = []
    for row in setting.rows.peak:
        batch = 32 * row.devices
        plan = setting.plan(
            RATRAIN, row.model, row.devices, batch, pipeline=row.pipeline, zero=row.zero, tensor=1
        )
        cells.append(
            Cell(
                row.name, "peak", "bytes", _peak(plan), row.bytes, _reading(row.assumed), note=describe(plan)
            )
        )
        fewest, nearest = row.devices, ""
        while fewest > 1:
            try:
                smaller = setting.plan(RATRAIN, row.model, fewest // 2, batch)
            except UserError:
                break
            if not fits(smaller):
                nearest = f"on {fewest // 2}: {_fit(smaller)}"
                break
            fewest //= 2
        cells.append(Cell(row.name, "fewest", "clusters", fewest, row.devices, "predicted", note=nearest))
    words = tuple(f"{row.name}: {row.assumed}" for row in setting.rows.peak if row.assumed)
    return Table("memory", "Memory: peaks and the fewest clusters", tuple(cells), words)


def recorded(setting: Setting) -> Table:
    """What was run: how far losses deviate."""
    cells = [
        Cell(row.name, "deviation", "%", row.ours, row.paper, "recorded", note=row.source)
        for row in setting.rows.recorded
    ]
    words = [f"{row.name}: {row.published}" for row in setting.rows.recorded]
    return Table("loss", "Loss deviation", tuple(cells), tuple(words))


def errors(setting: Setting, steps: Table) -> Table:
    """How far the predicted steps of `published` are from the published ones, against the paper's own error."""
    off = [abs(c.ratio - 1) for c in steps.cells if c.unit == "s" and c.reading != "calibrated" and c.ratio]
    cells = []
    for claim in setting.rows.claim if off else ():
        note = f"{len(off)} rows, {min(off):.1%} to {max(off):.1%}; the paper: {claim.published}"
        mean = sum(off) / len(off)
        cells.append(Cell(claim.claim, "mean over rows", "%", mean, claim.value, "assumed", note=note))
    words = (
        "The paper's error is of its own layouts, which it knew; ours is of layouts that had to be read in.",
    )
    return Table("error", "Planner error", tuple(cells), words)


def reproduce(setting: Setting, only: set[str] | None = None) -> tuple[Table, ...]:
    """The tables named in `only` (None: all), in order; UserError for a name that is none of TABLES."""
    for name in only or ():
        if name not in TABLES:
            raise UserError(f"no table {name!r}; expected one of {', '.join(TABLES)}")
    wanted = [name for name in TABLES if only is None or name in only]
    made: dict[str, Table] = {}
    for name in wanted:
        if name == "error":
            made[name] = errors(setting, made.get("published") or published(setting))
        else:
            made[name] = _TABLES[name](setting)
    return tuple(made.values())


_TABLES: Mapping[str, Callable[[Setting], Table]] = MappingProxyType(
    {
        "published": published,
        "models": models,
        "ablation": ablation,
        "memory": memory,
        "scaling": scaling,
        "loss": recorded,
    }
)
TABLES = (*_TABLES, "error")


def _recipe_cells(setting: Setting, row: ModelRow, name: str) -> list[Cell]:
    degrees: dict[str, int | None] = {"pipeline": row.pipeline, "tensor": 1}
    if name == "zero3-heavy":
        degrees = {"tensor": 1}
    elif name == "tp-heavy":
        degrees = {"pipeline": row.pipeline}
    try:
        plan = setting.plan(name, row.model, row.devices, row.global_batch, **degrees)
    except UserError as error:
        return [Cell(row.model, name, "s", None, None, "assumed", note=str(error))]
    return _step_and_peak(row.model, name, plan, "assumed")


def _step_and_peak(row: str, quantity: str, plan: Plan, reading: str) -> list[Cell]:
    """What does not fit has a peak and no step."""
    peak = Cell(row, f"{quantity}{OF_PEAK}", "bytes", _peak(plan), None, reading)
    return [_step_cell(row, quantity, plan, None, reading), peak]


def _step_cell(row: str, quantity: str, plan: Plan, paper: float | None, reading: str) -> Cell:
    return Cell(row, quantity, "s", step_of(plan), paper, reading, note=f"{describe(plan)}, {_fit(plan)}")


def _steps(plans: Sequence[Plan]) -> list[float]:
    return [step for step in map(step_of, plans) if step is not None]


def _ranged(cell: Cell, values: Sequence[float]) -> Cell:
    """The cell with the range of its value over other readings."""
    return replace(cell, low=min(values), high=max(values)) if values else cell


def _fit(plan: Plan) -> str:
    """Its peak, and that it is too much if it is."""
    peak = format_bytes(_peak(plan))
    return f"peak {peak}" if fits(plan) else f"out of memory: {peak} of {format_bytes(plan.budget)}"


def _peak(plan: Plan) -> int:
    assert plan.forecast is not None
    return plan.forecast.peak


def _reading(assumed: str) -> str:
    return "assumed" if assumed else "predicted"


def _same_work(a: StepRow, b: StepRow) -> bool:
    return (a.model, a.devices, a.global_batch) == (b.model, b.devices, b.global_batch)
