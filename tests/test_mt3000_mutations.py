"""A schedule with one rule broken is caught by the executor."""

from dataclasses import replace

import numpy as np
import pytest

from ratrain.machine.mt3000.attention import Blocks, Heads, build_backward
from ratrain.machine.mt3000.chip import load_chip
from ratrain.machine.mt3000.executor import execute
from ratrain.machine.mt3000.gemm import Problem, Tiles, build_gemm
from ratrain.machine.mt3000.memory import NUMPY, MemoryFault
from ratrain.machine.mt3000.schedule import Barrier, Dma, Kernel, Schedule, Scope, Wait, walk

CHIP = load_chip("mt3000")
SCHEDULES = {
    "B resident": build_gemm(CHIP, Problem(200, 300, 300), Tiles(96, 128, 32, 24, 128, 12, PM=2, PN=3)),
    "C resident": build_gemm(
        CHIP, Problem(200, 300, 300), Tiles(48, 128, 32, 48, 64, 12, PN=3, a_copies=2, c_resident=True)
    ),
    "k split": build_gemm(
        CHIP,
        Problem(50, 70, 600),
        Tiles(24, 64, 32, 24, 32, 12, PK=4, a_copies=2, c_copies=1, c_resident=True),
    ),
    "attention backward": build_backward(CHIP, Heads(2, 2, 150, 150, 64), Blocks(2, 2, 32, 32, 12)),
}


def run(schedule: Schedule) -> None:
    random, arrays = np.random.default_rng(0), {}
    for operand in schedule.operands:
        shape = [schedule.extents[dim] for dim in operand.dims]
        arrays[operand.name] = random.standard_normal(shape).astype(NUMPY[operand.dtype])
    execute(schedule, CHIP, arrays)


def without(body, dropped, counter):
    """`body` with the statement number `dropped` left out, or replaced by a tuple of others."""
    kept = []
    for statement in body:
        if isinstance(statement, Scope):
            kept.append(replace(statement, body=without(statement.body, dropped, counter)))
            continue
        here = next(counter)
        kept.extend(dropped.get(here, (statement,)))
    return tuple(kept)


def mutate(schedule: Schedule, changes) -> Schedule:
    return replace(schedule, body=without(schedule.body, changes, iter(range(10**6))))


def leaves(schedule: Schedule):
    return [statement for statement in walk(schedule.body) if not isinstance(statement, Scope)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_unbroken_schedules_run(name: str) -> None:
    assert SCHEDULES[name].fits(CHIP)
    run(SCHEDULES[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_wait_is_needed(name: str) -> None:
    schedule = SCHEDULES[name]
    for index, statement in enumerate(leaves(schedule)):
        if isinstance(statement, Wait):
            with pytest.raises(MemoryFault):
                run(mutate(schedule, {index: ()}))
                pytest.fail(f"{statement} is not missed")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_barrier_is_needed(name: str) -> None:
    schedule = SCHEDULES[name]
    for index, statement in enumerate(leaves(schedule)):
        if isinstance(statement, Barrier):
            with pytest.raises(MemoryFault):
                run(mutate(schedule, {index: ()}))
                pytest.fail(f"barrier {index} is not missed")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_load_is_needed(name: str) -> None:
    """But for the second use of the reduction buffer, where old sums would be read: numbers show that."""
    schedule = SCHEDULES[name]
    for index, statement in enumerate(leaves(schedule)):
        if isinstance(statement, Dma) and schedule.level(statement.dst) != "ddr" and statement.src != "dKt":
            with pytest.raises(MemoryFault):
                run(mutate(schedule, {index: ()}))
                pytest.fail(f"{statement} is not missed")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_buffer_must_be_as_large_as_it_is(name: str) -> None:
    schedule = SCHEDULES[name]
    for number, buffer in enumerate(schedule.buffers):
        if buffer.shape[0] < 2:
            continue
        smaller = replace(buffer, shape=(buffer.shape[0] - 1, *buffer.shape[1:]))
        buffers = (*schedule.buffers[:number], smaller, *schedule.buffers[number + 1 :])
        with pytest.raises(MemoryFault, match="overflow"):
            run(replace(schedule, buffers=buffers))


def test_one_copy_where_two_are_needed() -> None:
    schedule = SCHEDULES["B resident"]
    for name in ("A_sm", "B_am", "C_am"):
        buffers = tuple(replace(b, copies=1) if b.name == name else b for b in schedule.buffers)
        with pytest.raises(MemoryFault):
            run(replace(schedule, buffers=buffers))


def test_swapped_buffers_and_illegal_paths() -> None:
    schedule = SCHEDULES["C resident"]
    for index, statement in enumerate(leaves(schedule)):
        if isinstance(statement, Kernel) and statement.name == "gemm":
            args = dict(statement.args)
            swapped = replace(statement, args=(("a", args["b"]), ("b", args["a"]), ("c", args["c"])))
            with pytest.raises((MemoryFault, ValueError)):
                run(mutate(schedule, {index: (swapped,)}))
            in_gsm = replace(statement, args=(("a", "A_gsm"), ("b", args["b"]), ("c", args["c"])))
            with pytest.raises(MemoryFault, match="not in gsm"):
                run(mutate(schedule, {index: (in_gsm,)}))
        if isinstance(statement, Dma) and statement.dst == "A_sm":
            with pytest.raises(MemoryFault, match="no DMA path from ddr to sm"):
                run(mutate(schedule, {index: (replace(statement, src="A"),)}))


def test_a_schedule_too_large_for_the_chip_is_refused() -> None:
    schedule = build_gemm(CHIP, Problem(2048, 64, 2048), Tiles(2048, 2048, 32, 96, 64, 6, PN=2))
    assert not schedule.fits(CHIP)
    with pytest.raises(MemoryFault, match=r"overflow.*gsm"):
        run(schedule)
