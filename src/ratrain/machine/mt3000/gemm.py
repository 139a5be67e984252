"""GEMM schedules: C[m,n] = A[m,k] B[k,n] on the cluster, in NUDT's loop order and one sibling of it.

Loops, outer first: cores (a grid over m and n, or a split of k) / k by KG / m by MG (A panel: DDR to GSM, shared)
/ then, *B resident*: k by KA / n by NA (B: DDR to AM) / m by MA (C: DDR to AM and back) / m by MS (A: GSM to SM);
or, *C resident*: n by NA (C stays in AM) / k by KA (B: DDR to AM) / m by MS. The second reads and writes C once
per KG instead of once per KA, and needs MA = MG. With k split over the cores the order is m / n (C stays in AM) /
k by KG (A, private panels in GSM) / k by KA (B) / m by MS, and the cores' sums are added up through GSM.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ratrain.machine.mt3000.chip import ACCUMULATOR, Chip
from ratrain.machine.mt3000.schedule import (
    Barrier,
    Buffer,
    Dma,
    Kernel,
    Loop,
    Operand,
    Schedule,
    Split,
    Statement,
    Wait,
    When,
)

FIRST_K, LATER_K = (When("k", "first"),), (When("k", "first", not_=True),)
LAST_K, EARLIER_K = (When("k", "last"),), (When("k", "last", not_=True),)


@dataclass(frozen=True)
class Problem:
    """C[m,n] = op(A) op(B). `trans`: nn, nt (B stored [n,k]) or tn (A stored [k,m])."""

    m: int
    n: int
    k: int
    dtype: str = "fp16"
    trans: str = "nn"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"gemm {self.dtype} {self.trans} {self.m} x {self.n} x {self.k}"


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one schedule. MG, MA, MS rows; KG, KA depths; NA columns, all per core or core group.

    The cores form a grid of PM x PN; PK > 1 splits k instead (PM = PN = 1, two A panels, one C tile, MA = MG).
    `a_copies` panels in GSM, `c_copies` tiles of C in AM. `c_resident` selects the second loop order.
    """

    MG: int
    KG: int
    NA: int
    MA: int
    KA: int
    MS: int
    PM: int = 1
    PN: int = 1
    PK: int = 1
    a_copies: int = 1
    c_copies: int = 3
    c_resident: bool = False

    @property
    def cores(self) -> int:
        return self.PM * self.PN * self.PK


def transposes_in_am(chip: Chip, problem: Problem) -> bool:
    return problem.trans == "nt" and chip.nt_in_am


def build_gemm(chip: Chip, problem: Problem, tiles: Tiles) -> Schedule:
    """The schedule for these tiles; whether it fits is `Schedule.fits`."""
    dtype, wide = problem.dtype, ACCUMULATOR[problem.dtype]
    rounds = dtype != wide
    partial = "W" if rounds else "C"
    a_dims = ("k", "m") if problem.trans == "tn" else ("m", "k")
    b_dims = ("n", "k") if problem.trans == "nt" else ("k", "n")
    extent = {"m": tiles.MG, "k": tiles.KG}
    staged = {"m": tiles.MS, "k": tiles.KA}
    tile_b = {"n": tiles.NA, "k": tiles.KA}
    flipped = transposes_in_am(chip, problem)
    operands = [Operand("A", a_dims, dtype), Operand("B", b_dims, dtype), Operand("C", ("m", "n"), dtype)]
    if rounds and tiles.PK == 1 and problem.k > (tiles.KG if tiles.c_resident else tiles.KA):
        operands.append(Operand("W", ("m", "n"), wide))
    buffers = [
        Buffer("A_gsm", "gsm", a_dims, tuple(extent[d] for d in a_dims), dtype, tiles.a_copies, tiles.PN),
        Buffer("A_sm", "sm", a_dims, tuple(staged[d] for d in a_dims), dtype, 2),
        Buffer("B_in" if flipped else "B_am", "am", b_dims, tuple(tile_b[d] for d in b_dims), dtype, 2),
        Buffer("C_am", "am", ("m", "n"), (tiles.MA, tiles.NA), wide, tiles.c_copies),
    ]
    if flipped:
        buffers.append(Buffer("B_am", "am", ("k", "n"), (tiles.KA, tiles.NA), dtype))
    if rounds:
        buffers.append(Buffer("H_am", "am", ("m", "n"), (-(-tiles.MA // tiles.PK), tiles.NA), dtype, 2))
    split_k = tiles.PK > 1
    spills = "W" in {o.name for o in operands} or (not rounds and not split_k)
    multiply = Loop(
        "m",
        tiles.MS,
        (
            Wait("A_gsm>A_sm"),
            Dma("A_gsm", "A_sm", ahead=True),
            Kernel(
                "gemm", (("a", "A_sm"), ("b", "B_am"), ("c", "C_am")), (("m", "m"), ("n", "n"), ("k", "k"))
            ),
        ),
        rotates=("A_sm",),
    )
    fetch_b = _fetch_b(tiles, flipped)
    open_c, close_c = (
        _open_c(tiles, partial, spills, split_k),
        _close_c(tiles, partial, spills, rounds, split_k),
    )
    if split_k:
        share = -(-tiles.MA // tiles.PK)
        operands_share = (tiles.PK, tiles.MA, tiles.NA)
        buffers.append(Buffer("R_gsm", "gsm", ("share", "m", "n"), operands_share, wide, 1, tiles.PK))
        buffers.append(Buffer("R_am", "am", ("share", "m", "n"), (tiles.PK, share, tiles.NA), wide))
        buffers.append(Buffer("S_am", "am", ("m", "n"), (share, tiles.NA), wide))
    c_buffers = ("C_am", "R_gsm") if split_k else ("C_am", "H_am") if rounds else ("C_am",)
    b_buffers = ("B_in", "B_am") if flipped else ("B_am",)
    drain = (Wait(f"C_am>{partial}"),) if spills else ()
    # Prefetches may run on from panel to panel, since a panel has its own rows of C; from one depth to the next
    # they may not: the sums of C must have landed in DDR before they are read again.
    one_depth = tiles.c_resident or tiles.KA >= tiles.KG
    inner: Statement
    over_k = Loop("k", tiles.KA, (*fetch_b, multiply), rotates=b_buffers, chained=True)
    if split_k:
        panels = Loop("k", tiles.KG, (*_panel(tiles), over_k), rotates=("A_gsm",), chained=True)
        inner = Loop("n", tiles.NA, (*open_c, panels, *close_c), rotates=c_buffers, chained=True)
        over_panels = Loop("m", tiles.MG, (inner,))
    elif tiles.c_resident:
        inner = Loop("n", tiles.NA, (*open_c, over_k, *close_c), rotates=c_buffers, chained=True)
    else:
        over_m = Loop("m", tiles.MA, (*open_c, multiply, *close_c), rotates=c_buffers, chained=True)
        over_n = Loop("n", tiles.NA, (*fetch_b, over_m), rotates=b_buffers, chained=one_depth)
        inner = Loop("k", tiles.KA, (over_n,) if one_depth else (over_n, *drain), chained=one_depth)
    if not split_k:
        panels = Loop("m", tiles.MG, (*_panel(tiles), inner), rotates=("A_gsm",))
        over_panels = Loop("k", tiles.KG, (panels, *drain) if one_depth else (panels,))
    landed = (Wait("H_am>C"),) if rounds and not split_k else ()
    body: tuple[Statement, ...] = (over_panels, *landed)
    lanes = chip.lanes(dtype)
    if split_k:
        body = (Split("k", tiles.PK, body),)
    else:
        body = (
            Split("m", tiles.PM, (Split("n", tiles.PN, body, unit=lanes),), stride=tiles.PN, unit=chip.rows),
        )
    extents = {"m": problem.m, "n": problem.n, "k": problem.k}
    if split_k:
        extents["share"] = tiles.PK
    return Schedule(
        name=str(problem),
        cores=tiles.cores,
        extents=extents,
        operands=tuple(operands),
        buffers=tuple(buffers),
        body=body,
        flops=problem.flops,
        dtype=dtype,
        tiles={key: int(value) for key, value in asdict(tiles).items()},
    )


def _panel(tiles: Tiles) -> tuple[Statement, ...]:
    """The A panel: each core of a group loads its rows; barriers keep readers and writers apart."""
    if tiles.PK > 1:
        return (Wait("A>A_gsm"), Dma("A", "A_gsm", ahead=True))
    if tiles.a_copies > 1:
        load = Split("m", tiles.PN, (Dma("A", "A_gsm", ahead=True),))
        return (Wait("A>A_gsm"), Barrier(), load)
    # Where B is broadcast, the cores meet before its first tile, and so before they read the panel.
    meet = (Barrier(),) if tiles.PM == 1 else ()
    return (Barrier(), Split("m", tiles.PN, (Dma("A", "A_gsm"),)), Wait("A>A_gsm"), *meet)


def _fetch_b(tiles: Tiles, flipped: bool) -> tuple[Statement, ...]:
    target = "B_in" if flipped else "B_am"
    meet = (Barrier(),) if tiles.PM > 1 else ()
    fetch: tuple[Statement, ...] = (
        Wait(f"B>{target}"),
        *meet,
        Dma("B", target, ahead=True, broadcast=tiles.PM),
    )
    if flipped:
        fetch += (Kernel("transpose", (("src", "B_in"), ("dst", "B_am"))),)
    return fetch


def _open_c(tiles: Tiles, partial: str, spills: bool, split_k: bool) -> tuple[Statement, ...]:
    clear = Kernel("fill", (("out", "C_am"),), when=() if split_k else FIRST_K)
    if not spills:
        return (clear,)
    load = f"{partial}>C_am"
    return (
        Wait(load, when=LATER_K),
        Wait(f"C_am>{partial}", keep=tiles.c_copies - 2),
        Dma(partial, "C_am", ahead=True, when=LATER_K),
        clear,
    )


def _close_c(tiles: Tiles, partial: str, spills: bool, rounds: bool, split_k: bool) -> tuple[Statement, ...]:
    """Round and store C where its sum is complete, spill it where it is not."""
    if split_k:
        return _reduce_k(tiles, rounds)
    if not rounds:
        return (Dma("C_am", "C"),)
    spill = (Dma("C_am", "W", when=EARLIER_K),) if spills else ()
    return (
        *spill,
        Wait("H_am>C", keep=1, when=LAST_K),
        Kernel("cast", (("src", "C_am"), ("dst", "H_am")), when=LAST_K),
        Dma("H_am", "C", when=LAST_K),
    )


def _reduce_k(tiles: Tiles, rounds: bool) -> tuple[Statement, ...]:
    """Partial sums of a split k: every core puts its tile into GSM, then adds up its rows of all of them."""
    finish: tuple[Statement, ...] = (Dma("S_am", "C"), Wait("S_am>C"))
    if rounds:
        finish = (Kernel("cast", (("src", "S_am"), ("dst", "H_am"))), Dma("H_am", "C"), Wait("H_am>C"))
    mine = ("R_am", "S_am", "H_am") if rounds else ("R_am", "S_am")
    add = (
        Dma("R_gsm", "R_am"),
        Wait("R_gsm>R_am"),
        Kernel("sum_shares", (("src", "R_am"), ("dst", "S_am"))),
        *finish,
    )
    return (
        Barrier(),
        Split("share", tiles.PK, (Dma("C_am", "R_gsm"),)),
        Wait("C_am>R_gsm"),
        Barrier(),
        Split("m", tiles.PK, (Loop("m", -(-tiles.MA // tiles.PK), add, rotates=mine),)),
    )
