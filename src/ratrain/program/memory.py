"""The memory bound of a program: what its saved activations and buffers need at worst, floats included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ratrain.program.action import Action, Kind
from ratrain.program.program import Program
from ratrain.program.recovery import recovery_gates


@dataclass(frozen=True)
class Footprint:
    """Bytes of one stage, from outside: what a program does not know by itself.

    constant   present for the whole step: runtime base, views, gradients, shard, communication buffers
    kept       per (block, rung): held for one micro-batch between its forward and its backward or recovery
    working    per block: transient bytes while its FORWARD, RECOVER or BACKWARD runs
    boundary   of what one block hands another for a micro-batch, an output or its gradient
    """

    constant: int
    kept: Mapping[tuple[str, str], int]
    working: Mapping[str, int]
    boundary: int = 0


@dataclass(frozen=True)
class Peak:
    """The largest live bytes of a stage, the action at which they occur, and the activations among them."""

    total: int
    activations: int
    action: Action | None


def live_bytes(program: Program, stage: int, footprint: Footprint) -> list[tuple[Action, int]]:
    """Bytes of saved activations at each compute action of the list, the action's own working set included.

    Each float counts from its earliest legal position, so executing it early never exceeds this.
    """
    compute = program.lane(stage)["compute"]
    rise, fall = _changes(program, stage, compute, footprint)
    live, table = 0, []
    for i, action in enumerate(compute):
        live += rise[i]
        works = action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.RECOVER)
        table.append((action, live + (footprint.working.get(action.unit or "", 0) if works else 0)))
        live -= fall[i]
    return table


def peak(program: Program, stage: int, footprint: Footprint) -> Peak:
    """The memory bound of a stage."""
    table = live_bytes(program, stage, footprint)
    if not table:
        return Peak(footprint.constant, 0, None)
    action, most = max(table, key=lambda entry: entry[1])
    return Peak(footprint.constant + most, most, action)


def in_flight(program: Program, stage: int) -> int:
    """The most micro-batches whose activations a stage holds at once."""
    open_, most = 0, 0
    first = program.layout.stages[stage][0]
    for action in program.lane(stage)["compute"]:
        if action.unit == first and action.kind is Kind.FORWARD:
            open_ += 1
            most = max(most, open_)
        elif action.unit == first and action.kind is Kind.RELEASE and action.phase == "act":
            open_ -= 1
    return most


def handed_over(program: Program, stage: int) -> dict[Action, int]:
    """By how much each FORWARD and BACKWARD changes the number of boundary tensors that wait while it runs.

    A tensor waits between the action that makes it and the one that takes it, where others come between: only
    where micro-batches go block by block.
    """
    compute = program.lane(stage)["compute"]
    order = [a for a in compute if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
    position = {action: i for i, action in enumerate(order)}
    blocks = program.layout.stages[stage]
    takers = {
        Kind.FORWARD: dict(pairwise(blocks)),
        Kind.BACKWARD: dict(pairwise(blocks[::-1])),
    }
    change = [0] * len(order)
    for i, action in enumerate(order):
        taker = takers[action.kind].get(action.unit or "")
        if taker is not None:
            taken = position[action._replace(unit=taker)]
            if taken > i + 1:
                change[i + 1] += 1
                change[taken] -= 1
    return {action: n for action, n in zip(order, change) if n}


def _changes(
    program: Program, stage: int, compute: tuple[Action, ...], footprint: Footprint
) -> tuple[list[int], list[int]]:
    """Bytes that appear before and vanish after each position of the compute list."""
    position = {action: i for i, action in enumerate(compute)}
    rise, fall = [0] * len(compute), [0] * len(compute)
    gates = recovery_gates(program, stage)
    trains = program.form in ("first", "steady")
    for action, count in handed_over(program, stage).items():
        rise[position[action]] += count * footprint.boundary
    for i, action in enumerate(compute):
        block, j = action.unit or "", action.microbatch
        if action.kind is Kind.FORWARD and trains:
            assert j is not None
            rise[i] += footprint.kept[block, program.keeps(stage, block, j)]
        elif action.kind is Kind.RECOVER:
            assert j is not None
            kept = footprint.kept[block, program.keeps(stage, block, j)]
            earliest = i
            if Kind.RECOVER in program.floating:
                gate = gates.get((block, j))
                done = -1 if gate is None else position[gate]
                earliest = max(position[Action(Kind.FORWARD, stage, block, j)], done) + 1
            rise[min(earliest, i)] += footprint.kept[block, "keep"] - kept
        elif action.kind is Kind.RELEASE and action.phase == "act":
            assert j is not None
            fall[i] += footprint.kept[block, "keep"]
    return rise, fall
