"""What a row's numbers say: equal losses, medians and ratios, bars, memory."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from race.arena import WARM_STEPS, Record
from race.overhead import MOST
from race.ratrain_plan import plan_of, working_set
from race.results import Result
from race.rows import RATRAIN, Bar, Case, Row
from ratrain.config import parse_bytes

LOSS_TOLERANCE = 1e-4
MEMORY_TOLERANCE = 1.03
"""RATrain may use what the peer uses and what its plan forecasts for recovery and grouping, and this much more."""


@dataclass(frozen=True)
class Check:
    """One thing that was asked of RATrain. `passed` None: could not be asked."""

    what: str
    passed: bool | None

    def __str__(self) -> str:
        return f"{'not measured' if self.passed is None else 'met' if self.passed else 'MISSED'}: {self.what}"


def loss_difference(record: Record, other: Record, steps: int) -> float:
    """Largest difference between two loss curves over their first `steps` steps."""
    pairs = list(zip(record.losses[:steps], other.losses[:steps]))
    return max((abs(a - b) for a, b in pairs), default=float("inf"))


def valid(row: Row, result: Result, case: Case) -> bool:
    """Whether the contender ran, and trained what RATrain trained."""
    record, reference = result.records[case.name], result.records[reference_name(row, result)]
    if record.error or not record.windows:
        return False
    return loss_difference(record, reference, WARM_STEPS + row.steps) <= LOSS_TOLERANCE


def fits(case: Case, record: Record) -> bool:
    """Whether no rank was ever larger than its device."""
    return not case.memory or max(record.peak) <= parse_bytes(case.memory, case.name)


def reference_name(row: Row, result: Result) -> str:
    """The contender that the others are compared with: the first RATrain that ran, else the first that did."""
    ran = [case for case in row.cases if result.records[case.name].windows]
    return next((case.name for case in ran if case.tool == RATRAIN), (ran or row.cases)[0].name)


def ratio(record: Record, other: Record) -> tuple[float, float, float]:
    """Ratio of medians, and the smallest and largest ratio of windows that were run next to each other."""
    paired = [a / b for a, b in zip(record.windows, other.windows)]
    return median(record.windows) / median(other.windows), min(paired), max(paired)


def checks(row: Row, result: Result) -> list[Check]:
    """Every bar of the row, the memory rule against each torch peer of the same layout, and the overhead."""
    return [*(_bar(row, result, bar) for bar in row.bars), *_memory(row, result), *_overhead(result)]


def _bar(row: Row, result: Result, bar: Bar) -> Check:
    against = bar.against
    peers = [c.name for c in row.cases if c.tool != RATRAIN and counts(row, result, c)]
    if against == "best peer" and peers:
        against = min(peers, key=lambda name: median(result.records[name].windows))
    who = bar.who
    if who == "best ratrain":
        ours = [c.name for c in row.cases if c.tool == RATRAIN and counts(row, result, c)]
        who = min(ours, key=lambda name: median(result.records[name].windows), default="")
    if against not in peers or who not in result.records or result.records[who].error:
        return Check(f"{bar.who} against {bar.against}: at most {bar.most:.2f}x", None)
    got, low, high = ratio(result.records[who], result.records[against])
    return Check(
        f"{who} against {against}: {got:.3f}x (windows {low:.3f} to {high:.3f}), at most {bar.most:.2f}x",
        got <= bar.most,
    )


def _overhead(result: Result) -> list[Check]:
    return [
        Check(f"program and executor of {name} {share:.2%} of the step, at most {MOST:.0%}", share <= MOST)
        for name, share in result.overhead.items()
    ]


def counts(row: Row, result: Result, case: Case) -> bool:
    """Whether it trained what RATrain trained, within the limit."""
    return valid(row, result, case) and fits(case, result.records[case.name])


def _memory(row: Row, result: Result) -> list[Check]:
    case = next(c for c in row.cases if c.tool == RATRAIN)
    record = result.records[case.name]
    found = []
    for peer in row.cases:
        if peer.tool in (RATRAIN, "deepspeed-zero", "deepspeed-pipeline") or not valid(row, result, peer):
            continue
        if (peer.pipeline, peer.data, peer.layers) != (case.pipeline, case.data, case.layers) or record.error:
            continue
        working = working_set(plan_of(case), case.model.spec())
        allowed = [
            (theirs + working[case.place(rank)[0]]) * MEMORY_TOLERANCE
            for rank, theirs in enumerate(result.records[peer.name].peak)
        ]
        worst = max(range(case.ranks), key=lambda rank: record.peak[rank] / allowed[rank])
        text = (
            f"peak memory of rank {worst} {record.peak[worst] / 1e6:.0f} MB, {peer.name} and what the plan "
            f"forecasts for recovery and grouping allow {allowed[worst] / 1e6:.0f} MB"
        )
        found.append(Check(text, record.peak[worst] <= allowed[worst]))
    return found
