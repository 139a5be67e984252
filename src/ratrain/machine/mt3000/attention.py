"""Attention schedules: forward that saves only the row log-sum-exp, and a backward that stays on the chip.

Groups of cores take key-value heads; within a group every core holds its own query rows (dealt out in turn, so
that causal work is even) while blocks of keys and values pass through GSM. Scores lie transposed, [t, q]: keys
down, queries across the vector lanes. Then K and V are the scalar operands (GSM to SM), queries and
probabilities stay in AM, and no S x S matrix ever leaves AM. The backward's five products follow
arXiv 2307.08691 (FlashAttention-2): recompute S and P; dV += P'dO; dP = dO V'; dS = P (dP - D) over P;
dQ += dS K; dK += dS'Q. dV and dK are summed over the group's cores through GSM.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil

from ratrain.errors import UserError
from ratrain.machine.mt3000.chip import Chip
from ratrain.machine.mt3000.cost import Cost, price
from ratrain.machine.mt3000.schedule import (
    Barrier,
    Buffer,
    Causal,
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

HEAD = ("b", "g", "q", "d")
KEYS = ("b", "t", "d")


@dataclass(frozen=True)
class Heads:
    """Shapes: `kv_heads` key-value heads over the whole micro-batch, `group` query heads for each, `queries` and
    `keys` positions, `d` elements a head. Causal: query i sees keys up to i + keys - queries."""

    kv_heads: int
    group: int
    queries: int
    keys: int
    d: int
    causal: bool = True

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that attend."""
        if not self.causal:
            return self.queries * self.keys
        return self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) // 2

    @property
    def flops(self) -> int:
        """Of the forward's two products; the backward's five are 2.5 times this."""
        return 4 * self.kv_heads * self.group * self.pairs * self.d

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return (
            f"attention {kind} {self.kv_heads} x {self.group} heads, {self.queries} x {self.keys}, d {self.d}"
        )


@dataclass(frozen=True)
class Blocks:
    """`HG` groups of `PQ` cores; a core holds `QB` query rows at a time; key blocks of `TB`; `MS` rows in SM."""

    HG: int
    PQ: int
    QB: int
    TB: int
    MS: int


def build_forward(chip: Chip, heads: Heads, blocks: Blocks) -> Schedule:
    """O and the row log-sum-exp L from Q [b,g,q,d], K, V [b,t,d]."""
    d, qb, tb = heads.d, blocks.QB, blocks.TB
    state = ("Q_in", "Qt", "acc", "top", "total", "lse", "O_out")
    buffers = (
        *_key_buffers(blocks, d),
        Buffer("Q_in", "am", ("q", "d"), (qb, d), "fp16"),
        Buffer("Qt", "am", ("d", "q"), (d, qb), "fp16"),
        Buffer("acc", "am", ("d", "q"), (d, qb), "fp32"),
        Buffer("top", "am", ("q",), (qb,), "fp32"),
        Buffer("total", "am", ("q",), (qb,), "fp32"),
        Buffer("lse", "am", ("q",), (qb,), "fp32"),
        Buffer("O_out", "am", ("q", "d"), (qb, d), "fp16"),
        Buffer("S", "am", ("t", "q"), (tb, qb), "fp32"),
        Buffer("P", "am", ("t", "q"), (tb, qb), "fp16"),
    )
    softmax = Kernel(
        "online_softmax",
        (("s", "S"), ("p", "P"), ("top", "top"), ("total", "total"), ("acc", "acc")),
        (("q", "q"), ("t", "t")),
        _values(heads),
    )
    block = (
        *_scores("K_gsm", "Qt", "S", blocks),
        softmax,
        _over_keys("V_gsm", blocks, ("m", "d"), ("n", "q"), ("k", "t"), b="P", c="acc"),
    )
    opening = (
        Dma("Q", "Q_in"),
        Wait("Q>Q_in"),
        Kernel("transpose", (("src", "Q_in"), ("dst", "Qt"))),
        Kernel("fill", (("out", "acc"),)),
        Kernel("fill", (("out", "top"),), values=(("value", float("-inf")),)),
        Kernel("fill", (("out", "total"),)),
    )
    closing = (
        Kernel("finish_softmax", (("acc", "acc"), ("top", "top"), ("total", "total"), ("lse", "lse"))),
        Kernel("transpose", (("src", "acc"), ("dst", "O_out"))),
        Dma("O_out", "O"),
        Dma("lse", "L"),
        Wait("O_out>O"),
        Wait("lse>L"),
    )
    operands = (
        Operand("Q", HEAD, "fp16"),
        Operand("K", KEYS, "fp16"),
        Operand("V", KEYS, "fp16"),
        Operand("O", HEAD, "fp16"),
        Operand("L", ("b", "g", "q"), "fp32"),
    )
    body = _skeleton(chip, heads, blocks, state, ("S", "P"), opening, block, (), closing, ())
    return _schedule("forward", heads, blocks, operands, buffers, body, heads.flops)


def build_backward(chip: Chip, heads: Heads, blocks: Blocks) -> Schedule:
    """dQ, dK, dV from dO, Q, K, V, O and L. Partial dK, dV of a shared head wait in DDR as FP32."""
    d, qb, tb, share = heads.d, blocks.QB, blocks.TB, ceil(blocks.TB / blocks.PQ)
    passes = heads.group * ceil(heads.queries / (blocks.PQ * qb))
    state = ("Q_gsm", "G_gsm", "Q_in", "G_in", "O_in", "Qt", "Gt", "dQt", "lse", "delta")
    buffers = (
        *_key_buffers(blocks, d),
        Buffer("Q_gsm", "gsm", ("q", "d"), (qb, d), "fp16"),
        Buffer("G_gsm", "gsm", ("q", "d"), (qb, d), "fp16"),
        Buffer("R_gsm", "gsm", ("share", "d", "t"), (blocks.PQ, d, tb), "fp32", 1, blocks.PQ),
        Buffer("Q_sm", "sm", ("q", "d"), (blocks.MS, d), "fp16", 2),
        Buffer("Q_in", "am", ("q", "d"), (qb, d), "fp16"),
        Buffer("G_in", "am", ("q", "d"), (qb, d), "fp16"),
        Buffer("O_in", "am", ("q", "d"), (qb, d), "fp16"),
        Buffer("Qt", "am", ("d", "q"), (d, qb), "fp16"),
        Buffer("Gt", "am", ("d", "q"), (d, qb), "fp16"),
        Buffer("dQt", "am", ("d", "q"), (d, qb), "fp32"),
        Buffer("lse", "am", ("q",), (qb,), "fp32"),
        Buffer("delta", "am", ("q",), (qb,), "fp32"),
        Buffer("S", "am", ("t", "q"), (tb, qb), "fp32"),
        Buffer("P", "am", ("t", "q"), (tb, qb), "fp16"),
        Buffer("Pq", "am", ("q", "t"), (qb, tb), "fp16"),
        Buffer("dVt", "am", ("d", "t"), (d, tb), "fp32"),
        Buffer("dKt", "am", ("d", "t"), (d, tb), "fp32"),
        Buffer("R_am", "am", ("share", "d", "t"), (blocks.PQ, d, share), "fp32"),
        Buffer("sum", "am", ("d", "t"), (d, share), "fp32"),
        Buffer("wide", "am", ("t", "d"), (share, d), "fp32"),
        Buffer("narrow", "am", ("t", "d"), (share, d), "fp16"),
        *((Buffer("prior", "am", ("t", "d"), (share, d), "fp32"),) if passes > 1 else ()),
    )
    flip = Kernel("transpose", (("src", "P"), ("dst", "Pq")))
    block = (
        *_scores("K_gsm", "Qt", "S", blocks),
        Kernel(
            "probability", (("s", "S"), ("lse", "lse"), ("p", "P")), (("q", "q"), ("t", "t")), _values(heads)
        ),
        flip,
        _over_queries("G_gsm", blocks, "dVt"),
        *_scores("V_gsm", "Gt", "S", blocks),
        Kernel("score_gradient", (("p", "P"), ("dp", "S"), ("delta", "delta")), values=_values(heads)),
        _over_keys("K_gsm", blocks, ("m", "d"), ("n", "q"), ("k", "t"), b="P", c="dQt"),
        flip,
        _over_queries("Q_gsm", blocks, "dKt"),
    )
    opening = (
        Dma("Q", "Q_gsm"),
        Dma("dO", "G_gsm"),
        Dma("O", "O_in"),
        Dma("L", "lse"),
        Wait("Q>Q_gsm"),
        Dma("Q_gsm", "Q_in"),
        Wait("dO>G_gsm"),
        Dma("G_gsm", "G_in"),
        Wait("Q_gsm>Q_in"),
        Kernel("transpose", (("src", "Q_in"), ("dst", "Qt"))),
        Wait("G_gsm>G_in"),
        Kernel("transpose", (("src", "G_in"), ("dst", "Gt"))),
        Wait("O>O_in"),
        Wait("L>lse"),
        Kernel("row_dot", (("a", "G_in"), ("b", "O_in"), ("out", "delta"))),
        Kernel("fill", (("out", "dQt"),)),
    )
    closing = (
        Kernel("transpose", (("src", "dQt"), ("dst", "Q_in"))),
        Dma("Q_in", "dQ"),
        Wait("Q_in>dQ"),
    )
    clear = (Kernel("fill", (("out", "dVt"),)), Kernel("fill", (("out", "dKt"),)))
    # The cores have met since the last sums were read from GSM, at the start of the block; between the two not.
    seen: tuple[When, ...] = (When("q", "first", not_=True),)
    if heads.causal:
        seen += (When("t", "before", than="q"),)
    first, second = (_reduce(f"{name}t", name, blocks, passes, seen) for name in ("dV", "dK"))
    reduce = (*first, Barrier(), *second)
    operands = tuple(Operand(name, HEAD, "fp16") for name in ("Q", "O", "dO", "dQ"))
    operands += tuple(Operand(name, KEYS, "fp16") for name in ("K", "V", "dK", "dV"))
    operands += (Operand("L", ("b", "g", "q"), "fp32"),)
    if passes > 1:
        operands += (Operand("W_dK", KEYS, "fp32"), Operand("W_dV", KEYS, "fp32"))
    body = _skeleton(chip, heads, blocks, state, ("S", "P", "Pq"), opening, block, clear, closing, reduce)
    return _schedule("backward", heads, blocks, operands, buffers, body, heads.flops * 5 // 2)


def _values(heads: Heads) -> tuple[tuple[str, float], ...]:
    return (("scale", heads.d**-0.5), ("causal", float(heads.causal)))


def _key_buffers(blocks: Blocks, d: int) -> tuple[Buffer, ...]:
    return (
        Buffer("K_gsm", "gsm", ("t", "d"), (blocks.TB, d), "fp16", 2, blocks.PQ),
        Buffer("V_gsm", "gsm", ("t", "d"), (blocks.TB, d), "fp16", 2, blocks.PQ),
        Buffer("T_sm", "sm", ("t", "d"), (blocks.MS, d), "fp16", 2),
    )


def _skeleton(
    chip: Chip,
    heads: Heads,
    blocks: Blocks,
    state: tuple[str, ...],
    scratch: tuple[str, ...],
    opening: tuple[Statement, ...],
    block: tuple[Statement, ...],
    clear: tuple[Statement, ...],
    closing: tuple[Statement, ...],
    reduce: tuple[Statement, ...],
) -> tuple[Statement, ...]:
    """Heads over groups; rounds of query rows; blocks of keys past all of them, in step."""

    def mine(*body: Statement) -> Statement:
        """On this core's rows of the round, which `state` holds."""
        return Split("q", blocks.PQ, (Loop("q", blocks.QB, body, keeps=state),), strided=True)

    on_rows = Loop("q", blocks.QB, block, rotates=scratch)
    work: Statement = Causal("q", "t", chip.lanes_fp32, (on_rows,)) if heads.causal else on_rows
    fetch = (
        Wait("K>K_gsm"),
        Wait("V>V_gsm"),
        Barrier(),
        Split("t", blocks.PQ, (Dma("K", "K_gsm", ahead=True), Dma("V", "V_gsm", ahead=True))),
    )
    rotates = ("K_gsm", "V_gsm", *(("dVt", "dKt", "R_gsm") if reduce else ()))
    keys = Loop(
        "t",
        blocks.TB,
        (*fetch, *clear, mine(work), *reduce),
        rotates=rotates,
        until="q" if heads.causal else None,
        chained=True,
    )
    rounds = Loop("q", blocks.PQ * blocks.QB, (mine(*opening), keys, mine(*closing)), chained=True)
    return (
        Split("b", blocks.HG, (Loop("b", 1, (Loop("g", 1, (rounds,), chained=True),)),), stride=blocks.PQ),
    )


def _scores(keys: str, queries: str, target: str, blocks: Blocks) -> tuple[Statement, ...]:
    """target[t,q] = keys[t,d] queries[d,q]"""
    multiply = _over_keys(keys, blocks, ("m", "t"), ("n", "q"), ("k", "d"), b=queries, c=target)
    return (Kernel("fill", (("out", target),)), multiply)


def _over_keys(source: str, blocks: Blocks, *dims: tuple[str, str], b: str, c: str) -> Statement:
    """c += a product whose scalar operand is `source` [t,d], passed through SM in tiles."""
    body = (
        Wait(f"{source}>T_sm"),
        Dma(source, "T_sm", ahead=True),
        Kernel("gemm", (("a", "T_sm"), ("b", b), ("c", c)), dims),
    )
    return Loop("t", blocks.MS, body, rotates=("T_sm",))


def _over_queries(source: str, blocks: Blocks, target: str) -> Statement:
    """target[d,t] += source[q,d]' Pq[q,t]"""
    body = (
        Wait(f"{source}>Q_sm"),
        Dma(source, "Q_sm", ahead=True),
        Kernel("gemm", (("a", "Q_sm"), ("b", "Pq"), ("c", target)), (("m", "d"), ("n", "t"), ("k", "q"))),
    )
    return Loop("q", blocks.MS, body, rotates=("Q_sm",))


def _reduce(
    partial: str, result: str, blocks: Blocks, passes: int, seen: tuple[When, ...]
) -> tuple[Statement, ...]:
    """Sum `partial` [d,t] over the group's cores into `result` [t,d]: every core adds up its share of keys."""
    # Earlier rounds of rows saw earlier keys only; earlier heads saw all.
    again = ((When("g", "first", not_=True),), (When("g", "first"), *seen))
    more = ((When("g", "last", not_=True),), (When("g", "last"), When("q", "last", not_=True)))
    done = (When("g", "last"), When("q", "last"))
    spill = f"W_{result}"
    load = tuple(Dma(spill, "prior", when=when) for when in again)
    add = tuple(Kernel("accumulate", (("src", "prior"), ("dst", "wide")), when=when) for when in again)
    save = tuple(Dma("wide", spill, when=when) for when in more)
    several = passes > 1
    body = (
        *(load if several else ()),
        Dma("R_gsm", "R_am"),
        Wait("R_gsm>R_am"),
        Kernel("sum_shares", (("src", "R_am"), ("dst", "sum"))),
        Kernel("transpose", (("src", "sum"), ("dst", "wide"))),
        *((Wait(f"{spill}>prior"), *add, *save) if several else ()),
        Kernel("cast", (("src", "wide"), ("dst", "narrow")), when=done),
        Dma("narrow", result, when=done),
        *((Wait(f"wide>{spill}"),) if several else ()),
        Wait(f"narrow>{result}"),
    )
    names = ("R_am", "sum", "wide", "narrow", *(("prior",) if several else ()))
    return (
        Split("share", blocks.PQ, (Dma(partial, "R_gsm"),)),
        Wait(f"{partial}>R_gsm"),
        Barrier(),
        Split("t", blocks.PQ, (Loop("t", ceil(blocks.TB / blocks.PQ), body, rotates=names),)),
    )


def _schedule(
    kind: str,
    heads: Heads,
    blocks: Blocks,
    operands: tuple[Operand, ...],
    buffers: tuple[Buffer, ...],
    body: tuple[Statement, ...],
    flops: int,
) -> Schedule:
    return Schedule(
        name=f"{heads} {kind}",
        cores=blocks.HG * blocks.PQ,
        extents={
            "b": heads.kv_heads,
            "g": heads.group,
            "q": heads.queries,
            "t": heads.keys,
            "d": heads.d,
            "share": blocks.PQ,
        },
        operands=operands,
        buffers=buffers,
        body=body,
        flops=flops,
        dtype="fp16",
        tiles=asdict(blocks),
        offset=heads.keys - heads.queries,
    )


@lru_cache(maxsize=512)
def best_attention(chip: Chip, heads: Heads, backward: bool, cores: int | None = None) -> Cost:
    """The cheapest schedule found, priced. UserError for shapes that no schedule covers."""
    check_heads(heads)
    build = build_backward if backward else build_forward
    ranked = sorted(
        (lane_steps(chip, heads, blocks), -blocks.TB, blocks.HG, blocks)
        for blocks in _candidates(chip, heads, cores or chip.cores)
    )
    best: Cost | None = None
    tried: set[int] = set()
    for _, _, groups, blocks in ranked:
        schedule = build(chip, heads, blocks)
        if groups in tried or not schedule.fits(chip):
            continue
        tried.add(groups)
        cost = price(schedule, chip, cores)
        if best is None or cost.cycles < best.cycles:
            best = cost
        if len(tried) == 2:
            break
    if best is None:
        raise UserError(f"{heads}: no schedule fits {chip.name}; give a smaller head size d")
    return best


def check_heads(heads: Heads) -> None:
    for name in ("kv_heads", "group", "queries", "keys", "d"):
        if getattr(heads, name) < 1:
            raise UserError(f"attention: {name} is {getattr(heads, name)}; it must be at least 1")
    if heads.causal and heads.keys < heads.queries:
        raise UserError(
            f"attention: {heads.queries} queries and {heads.keys} keys; causal attention needs at least as many keys"
        )


def _candidates(chip: Chip, heads: Heads, cores: int) -> list[Blocks]:
    found = []
    lanes = chip.lanes_fp32
    for groups in range(1, cores + 1):
        per_group = cores // groups
        if cores % groups or groups > heads.kv_heads:
            continue
        per_group = min(per_group, heads.queries)
        rows = ceil(heads.queries / per_group)
        held = {
            min(ceil(rows / rounds / lanes) * lanes, ceil(rows / lanes) * lanes)
            for rounds in (1, 2, 3, 4, 6, 8, 12, 16)
        }
        staged = chip.sm_bytes // 4 // (2 * heads.d) // chip.rows * chip.rows
        for qb in held:
            for tb in (64, 96, 128, 256):
                found.append(
                    Blocks(groups, per_group, qb, min(tb, ceil(heads.keys / lanes) * lanes), min(staged, 240))
                )
    return found


def lane_steps(chip: Chip, heads: Heads, blocks: Blocks) -> float:
    """A rank for blocks: vector lanes times passes of the busiest core, with a charge per pass for its start."""
    rows = ceil(heads.queries / blocks.PQ)
    rounds = ceil(rows / blocks.QB)
    lanes = chip.lanes_fp32
    full, rest = divmod(rows, blocks.QB)
    covered = full * ceil(blocks.QB / lanes) + ceil(rest / lanes)
    trimmed = 0.5 + 0.5 / max(1, covered) if heads.causal else 1.0
    return ceil(heads.kv_heads / blocks.HG) * heads.group * (covered * trimmed + 0.1 * rounds)


def attention_traffic(heads: Heads, blocks: Blocks, backward: bool) -> int:
    """DDR bytes in closed form: queries and outputs once, keys and values once per head and round of rows that
    reaches them; the backward also spills dK and dV (FP32) between the passes that share a head."""
    per_round, total, shift = blocks.PQ * blocks.QB, heads.keys, heads.keys - heads.queries
    starts = list(range(0, heads.queries, per_round))
    ends = [min(start + per_round, heads.queries) + shift if heads.causal else total for start in starts]
    reach = [min(total, ceil(end / blocks.TB) * blocks.TB) for end in ends]
    query_heads = heads.kv_heads * heads.group
    per_query = 4 if backward else 2
    moved = query_heads * (heads.queries * (heads.d * per_query * 2 + 4) + sum(reach) * heads.d * 2 * 2)
    if not backward:
        return moved
    stored = heads.group * sum(reach) - total
    fetched = (heads.group - 1) * sum(reach)
    for start, end in zip(starts[1:], reach[1:]):
        fetched += _seen_keys(start + shift, total, blocks) if heads.causal else end
    return moved + heads.kv_heads * heads.d * 2 * (total * 2 + (stored + fetched) * 4)


def _seen_keys(level: int, total: int, blocks: Blocks) -> int:
    """Keys in shares (of a core, of a block) that begin before `level`."""
    start = level // blocks.TB * blocks.TB
    size = min(blocks.TB, total - start)
    share = ceil(size / blocks.PQ) if size else 1
    return start + min(size, ceil((level - start) / share) * share)
