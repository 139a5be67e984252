"""Which tiles: enumerate grids and tile sizes, bound each by a closed estimate, price the best exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from ratrain.errors import UserError
from ratrain.machine.mt3000.chip import ACCUMULATOR, DTYPE_BYTES, Chip
from ratrain.machine.mt3000.cost import Cost, price
from ratrain.machine.mt3000.gemm import Problem, Tiles, build_gemm, transposes_in_am
from ratrain.machine.mt3000.kernels import gemm_cycles

FINALISTS = 2
DEPTHS = (128, 256, 512, 1024, 2048)
TILE_KEYS = ("MG", "KG", "NA", "MA", "KA", "MS", "PM", "PN", "PK")


@lru_cache(maxsize=4096)
def best_gemm(
    chip: Chip,
    problem: Problem,
    cores: int | None = None,
    fixed: tuple[tuple[str, int], ...] = (),
    split: str = "auto",
) -> Cost:
    """The cheapest schedule found, priced. `fixed` pins tile sizes; `split` pins the cores to n, m or k.

    UserError if the shape is empty or nothing that respects `fixed` fits the chip.
    """
    for name in "mnk":
        if getattr(problem, name) < 1:
            raise UserError(
                f"{name.upper()} is {getattr(problem, name)}; a matrix dimension must be at least 1"
            )
    cores = cores or chip.cores
    if not 1 <= cores <= chip.cores:
        raise UserError(f"cores is {cores}; {chip.name} has 1 to {chip.cores} cores per cluster")
    pinned = dict(fixed)
    for key, value in pinned.items():
        if key not in TILE_KEYS or value < 1:
            raise UserError(f"tile {key}={value}: expected one of {', '.join(TILE_KEYS)}, each at least 1")
    ranked = sorted(
        (
            (estimate(chip, problem, tiles), index, tiles)
            for index, tiles in enumerate(candidates(chip, problem, cores, pinned, split))
        ),
        key=lambda entry: entry[:2],
    )
    # The estimate is close to a lower bound. It ranks well among schedules of one kind, less well between kinds:
    # price the best few of each, and none whose estimate leaves less than a fiftieth to gain.
    best: Cost | None = None
    priced: dict[tuple[int, bool, int], int] = {}
    for bound, _, tiles in ranked:
        if best is not None and bound * 1.02 >= best.cycles:
            break
        kind = (tiles.a_copies, tiles.c_resident, tiles.PK)
        if priced.get(kind, 0) < FINALISTS:
            schedule = build_gemm(chip, problem, tiles)
            if schedule.fits(chip):
                priced[kind] = priced.get(kind, 0) + 1
                cost = price(schedule, chip, cores)
                best = cost if best is None or cost.cycles < best.cycles else best
    if best is None:
        asked = ", ".join(f"{key}={value}" for key, value in fixed) or "any tiles"
        raise UserError(
            f"{problem}: no schedule with {asked} fits {chip.name} (GSM {chip.gsm_bytes}, AM {chip.am_bytes}, "
            f"SM {chip.sm_bytes} bytes); give smaller tiles or fewer of them"
        )
    return best


def grids(
    problem: Problem, cores: int, chip: Chip, pinned: dict[str, int], split: str
) -> Iterator[tuple[int, int, int]]:
    """(PM, PN, PK): core grids that leave no core without work."""
    columns, rows = ceil(problem.n / chip.lanes(problem.dtype)), ceil(problem.m / chip.rows)
    found = set()
    for pm in range(1, cores + 1):
        if cores % pm == 0:
            pm_used = _parts(rows, pm)
            found.add((pm_used, _parts(columns, cores // pm), 1))
    found.add((1, _parts(columns, cores), 1))
    if problem.k >= 64 * cores > 64:
        found.add((1, 1, _parts(problem.k, cores)))
    if split == "n":
        found = {grid for grid in found if grid[0] == 1 and grid[2] == 1}
    elif split == "m":
        found = {(_parts(rows, cores), 1, 1)}
    elif split == "k":
        found = {(1, 1, _parts(problem.k, cores))}
    elif problem.m * problem.n > 256 * 1024:
        found = {grid for grid in found if grid[2] == 1}
    for pm, pn, pk in sorted(found):
        if pinned.get("PM", pm) == pm and pinned.get("PN", pn) == pn and pinned.get("PK", pk) == pk:
            yield pm, pn, pk


def _parts(pieces: int, ways: int) -> int:
    """How many of `ways` get something when `pieces` are dealt in equal shares."""
    return ceil(pieces / ceil(pieces / ways))


def candidates(
    chip: Chip, problem: Problem, cores: int, pinned: dict[str, int], split: str
) -> Iterator[Tiles]:
    lanes, rows, size = chip.lanes(problem.dtype), chip.rows, DTYPE_BYTES[problem.dtype]
    for pm, pn, pk in grids(problem, cores, chip, pinned, split):
        m, n, k = ceil(problem.m / pm), ceil(problem.n / pn), ceil(problem.k / pk)
        m = ceil(m / rows) * rows
        n = ceil(n / lanes) * lanes
        deepest = pinned.get("KA", pinned.get("KG", k))
        depths = {pinned["KA"]} if "KA" in pinned else {min(d, k, deepest) for d in (*DEPTHS, k)}
        widths = (
            {pinned["NA"]} if "NA" in pinned else {min(n, lanes * w) for w in (2, 4)} | _even(n, lanes, chip)
        )
        for ka in sorted(depths):
            ms = pinned.get("MS", min(m, chip.sm_bytes // (2 * ka * size) // rows * rows))
            if ms < 1:
                continue
            for na in sorted(widths):
                base = Tiles(0, 0, na, 0, ka, ms, pm, pn, pk)
                panels = _split_k_panels if pk > 1 else _panels
                yield from panels(chip, problem, pinned, base, m, k)


def _even(n: int, lanes: int, chip: Chip) -> set[int]:
    """Widths that cut n into equal tiles of a few vectors, as many as suit the micro-kernel and more."""
    vectors = n // lanes
    return {
        ceil(vectors / ceil(vectors / most)) * lanes for most in (chip.fma_units, chip.max_vectors, 8, 12)
    }


def _panels(
    chip: Chip, problem: Problem, pinned: dict[str, int], base: Tiles, m: int, k: int
) -> Iterator[Tiles]:
    """`base` (its KA, NA, MS and grid) with every panel and loop order that could fit; m, k are one core's."""
    size, ka = DTYPE_BYTES[problem.dtype], base.KA
    for c_resident in (False, True):
        if c_resident and pinned.get("MA", pinned.get("MG")) != pinned.get("MG", pinned.get("MA")):
            continue
        depths = {pinned["KG"]} if "KG" in pinned else {2 * ka, 4 * ka, k} if c_resident else {ka}
        for kg in sorted(depths):
            if c_resident and kg <= ka:
                continue
            # C is loaded only where sums are spilled; then a third tile lets load, compute and store overlap.
            copies = 3 if k > (kg if c_resident else ka) else 2
            rows = min(m, _rows_in_am(chip, problem, base, copies))
            for a_copies in (1, 2):
                panel = chip.gsm_bytes // (kg * size * a_copies * base.PM)
                if c_resident:
                    mg = ma = pinned.get("MA", pinned.get("MG", min(rows, panel)))
                else:
                    ma = pinned.get("MA", min(rows, panel, pinned.get("MG", rows)))
                    mg = pinned.get("MG", m if m <= panel else panel // max(1, ma) * ma)
                ma = min(ma, mg)
                if ma >= 1:
                    ms = min(base.MS, ma)
                    yield Tiles(
                        mg, kg, base.NA, ma, ka, ms, base.PM, base.PN, 1, a_copies, copies, c_resident
                    )


def _split_k_panels(
    chip: Chip, problem: Problem, pinned: dict[str, int], base: Tiles, m: int, k: int
) -> Iterator[Tiles]:
    size, wide = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[ACCUMULATOR[problem.dtype]]
    for kg in sorted({pinned["KG"]} if "KG" in pinned else {min(k, base.KA * times) for times in (1, 4)}):
        tiles = replace(base, KG=kg, a_copies=2, c_copies=1, c_resident=True)
        shared = chip.gsm_bytes // (base.PK * (2 * kg * size + base.NA * wide))
        rows = min(m, _rows_in_am(chip, problem, base, 1), shared)
        rows = pinned.get("MA", pinned.get("MG", rows))
        if rows >= 1:
            yield replace(tiles, MG=rows, MA=rows, MS=min(base.MS, rows))


def _rows_in_am(chip: Chip, problem: Problem, base: Tiles, c_copies: int) -> int:
    """The most rows of C, in whole micro-kernel blocks, that leave room for B."""
    size, wide = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[ACCUMULATOR[problem.dtype]]
    b_tiles = 3 if transposes_in_am(chip, problem) else 2
    free = chip.am_bytes - b_tiles * chip.aligned(base.KA * base.NA * size)
    per_row = c_copies * wide + (2 * size / base.PK if size != wide else 0)
    if base.PK > 1:
        per_row += wide + wide / base.PK
    return int(free / (per_row * base.NA)) // chip.rows * chip.rows


def estimate(chip: Chip, problem: Problem, tiles: Tiles) -> float:
    """Cycles, closed form: the slowest of compute with its issue costs, DDR and GSM, plus what cannot overlap."""
    size, wide = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[ACCUMULATOR[problem.dtype]]
    m = ceil(problem.m / tiles.PM / chip.rows) * chip.rows if tiles.PM > 1 else problem.m
    lanes = chip.lanes(problem.dtype)
    n = min(problem.n, ceil(problem.n / tiles.PN / lanes) * lanes)
    k: float = problem.k / tiles.PK
    direct_nt = problem.trans == "nt" and not chip.nt_in_am
    depth = k / tiles.KA
    columns, edge = divmod(n, tiles.NA)
    stages = ceil(m / tiles.MS) if m <= tiles.MA else ceil(m / tiles.MA) * ceil(min(m, tiles.MA) / tiles.MS)
    compute = 0.0
    for width, times in ((tiles.NA, columns), (edge, 1)):
        if not width or not times:
            continue
        step = gemm_cycles(chip, problem.dtype, tiles.MS, width, tiles.KA, direct_nt) / tiles.MS
        compute += times * depth * step * m
    across = ceil(n / tiles.NA)
    ramp = tiles.MS * tiles.KA * size / chip.gsm_bytes_per_cycle + chip.gsm_latency_cycles
    tiles_c = ceil(m / tiles.MA) * across * depth
    issue = chip.issue_cycles * (stages * across * depth + 3 * tiles_c) + ramp * tiles_c
    if transposes_in_am(chip, problem):
        compute += k * n / chip.lanes_fp32 * chip.transpose_cycles_per_vector * ceil(m / tiles.MG)
    if tiles.PM > 1:
        issue += chip.barrier_cycles * across * depth * ceil(m / tiles.MG)
    spills = max(0, ceil(k / (tiles.KG if tiles.c_resident else tiles.KA)) - 1) if tiles.PK == 1 else 0
    rereads = across if tiles.PK > 1 else 1
    moved: float = problem.m * problem.k * size * rereads + problem.k * problem.n * size * ceil(m / tiles.MG)
    moved += problem.m * problem.n * (2 * spills * wide + size)
    b_tiles = across * depth * (ceil(m / tiles.MG))
    ddr = moved / chip.ddr_bytes_per_cycle + b_tiles * (chip.ddr_latency_cycles + chip.issue_cycles)
    gsm = m * k * size * across / chip.gsm_bytes_per_cycle
    if tiles.PK > 1:
        issue += 2 * problem.m * problem.n * wide / chip.gsm_bytes_per_cycle
    panel = problem.m * problem.k * size / chip.ddr_bytes_per_cycle
    exposed = panel if tiles.a_copies == 1 else panel * min(1.0, tiles.MG / m * min(1.0, tiles.KG / k))
    first_b = tiles.KA * tiles.NA * size * tiles.PN / chip.ddr_bytes_per_cycle + chip.ddr_latency_cycles
    first_b *= ceil(k / tiles.KG)
    return max(compute + issue + exposed, ddr, gsm) + first_b
