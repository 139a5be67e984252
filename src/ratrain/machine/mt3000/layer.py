"""Schedules of everything in a layer that is not a matrix product: bound by DDR, so each streams its operands
once through AM, double-buffered, rows or elements dealt out over the cores."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ratrain.machine.mt3000.chip import DTYPE_BYTES, Chip
from ratrain.machine.mt3000.schedule import (
    Barrier,
    Buffer,
    Dma,
    Kernel,
    Loop,
    Operand,
    Pick,
    Schedule,
    Split,
    Statement,
    Wait,
)

Operands = dict[str, Operand]
Values = tuple[tuple[str, float], ...]
TILE_BYTES = (
    65_536  # of one operand in AM: long enough to hide a transfer's latency, short enough to pipeline
)


@lru_cache(maxsize=1024)
def rmsnorm_forward(chip: Chip, rows: int, width: int) -> Schedule:
    """Y = X / rms(X) * W by rows; saves the reciprocal root `rstd` (FP32). Run with the value eps."""
    loads = {"x": _rows("X", "rh"), "w": _rows("W", "h")}
    stores = {"y": _rows("Y", "rh"), "rstd": _rows("rstd", "r", "fp32")}
    return _stream(chip, "rmsnorm_forward", {"r": rows, "h": width}, "r", loads, stores)


@lru_cache(maxsize=1024)
def rmsnorm_backward(chip: Chip, rows: int, width: int) -> Schedule:
    """dX by rows; dW summed over rows on each core in FP32, then over cores through GSM."""
    loads = {
        "x": _rows("X", "rh"),
        "dy": _rows("dY", "rh"),
        "rstd": _rows("rstd", "r", "fp32"),
        "w": _rows("W", "h"),
    }
    stores = {"dx": _rows("dX", "rh")}
    return _stream(
        chip, "rmsnorm_backward", {"r": rows, "h": width}, "r", loads, stores, summed=("dw", _rows("dW", "h"))
    )


@lru_cache(maxsize=1024)
def rotary(chip: Chip, rows: int, heads: int, d: int, sign: int = 1) -> Schedule:
    """Y [r, head, d] = X rotated by cos, sin [r, d/2] (FP32); sign -1 rotates gradients back."""
    loads = {
        "x": Operand("X", ("r", "head", "d"), "fp16"),
        "cos": Operand("cos", ("r", "half"), "fp32"),
        "sin": Operand("sin", ("r", "half"), "fp32"),
    }
    stores = {"y": Operand("Y", ("r", "head", "d"), "fp16")}
    extents = {"r": rows, "head": heads, "d": d, "half": d // 2}
    return _stream(chip, "rotary", extents, "r", loads, stores, (("sign", float(sign)),))


@lru_cache(maxsize=1024)
def swiglu_forward(chip: Chip, elements: int) -> Schedule:
    """Y = silu(gate) * up."""
    loads = {"gate": _rows("gate", "i"), "up": _rows("up", "i")}
    return _stream(chip, "swiglu_forward", {"i": elements}, "i", loads, {"y": _rows("Y", "i")})


@lru_cache(maxsize=1024)
def swiglu_backward(chip: Chip, elements: int) -> Schedule:
    loads = {"gate": _rows("gate", "i"), "up": _rows("up", "i"), "dy": _rows("dY", "i")}
    stores = {"dgate": _rows("dgate", "i"), "dup": _rows("dup", "i")}
    return _stream(chip, "swiglu_backward", {"i": elements}, "i", loads, stores)


@lru_cache(maxsize=1024)
def add(chip: Chip, elements: int) -> Schedule:
    """Residual: Y = A + B. The same schedule joins two gradients."""
    return _stream(
        chip,
        "add",
        {"i": elements},
        "i",
        {"a": _rows("A", "i"), "b": _rows("B", "i")},
        {"y": _rows("Y", "i")},
    )


@lru_cache(maxsize=256)
def cross_entropy_forward(chip: Chip, rows: int, vocabulary: int) -> Schedule:
    """Loss and log-sum-exp of every row (FP32) from logits in tiles of the vocabulary; target < 0: no loss."""
    extents = {"r": rows, "v": vocabulary}
    height, width = _logit_tile(rows, vocabulary, chip)
    vectors = {
        name: Buffer(f"{name}_am", "am", ("r",), (height,), "fp32") for name in ("top", "total", "picked")
    }
    outs = {name: Buffer(f"{name}_am", "am", ("r",), (height,), "fp32", 2) for name in ("loss", "lse")}
    tiles = Buffer("logits_am", "am", ("r", "v"), (height, width), "fp16", 2)
    targets = Buffer("target_am", "am", ("r",), (height,), "i64", 2)
    rows_of = tuple((name, f"{name}_am") for name in ("top", "total", "picked"))
    statistics = Kernel(
        "xent_statistics", (("logits", "logits_am"), ("target", "target_am"), *rows_of), (("v", "v"),)
    )
    over_v = Loop(
        "v",
        width,
        (Wait("logits>logits_am"), Dma("logits", "logits_am", ahead=True), statistics),
        rotates=("logits_am",),
        chained=True,
    )
    finish = Kernel(
        "xent_finish", (*rows_of, ("target", "target_am"), ("loss", "loss_am"), ("lse", "lse_am"))
    )
    body = Loop(
        "r",
        height,
        (
            Wait("target>target_am"),
            Dma("target", "target_am", ahead=True),
            Kernel("fill", (("out", "top_am"),), values=(("value", float("-inf")),)),
            Kernel("fill", (("out", "total_am"),)),
            Kernel("fill", (("out", "picked_am"),)),
            over_v,
            Wait("loss_am>loss", keep=1),
            Wait("lse_am>lse", keep=1),
            finish,
            Dma("loss_am", "loss"),
            Dma("lse_am", "lse"),
        ),
        rotates=("target_am", "top_am", "total_am", "picked_am", "loss_am", "lse_am"),
    )
    operands = (
        Operand("logits", ("r", "v"), "fp16"),
        Operand("target", ("r",), "i64"),
        Operand("loss", ("r",), "fp32"),
        Operand("lse", ("r",), "fp32"),
    )
    buffers = (tiles, targets, *vectors.values(), *outs.values())
    ends = (Wait("loss_am>loss"), Wait("lse_am>lse"))
    return _dealt(
        chip, "cross_entropy_forward", extents, "r", operands, buffers, (body, *ends), 5 * rows * vocabulary
    )


@lru_cache(maxsize=256)
def cross_entropy_backward(chip: Chip, rows: int, vocabulary: int) -> Schedule:
    """Gradient of the logits, (softmax - one hot) * dloss, tile by tile."""
    extents = {"r": rows, "v": vocabulary}
    height, width = _logit_tile(rows, vocabulary, chip)
    rowwise = {"lse": "fp32", "dloss": "fp32", "target": "i64"}
    buffers = tuple(Buffer(f"{name}_am", "am", ("r",), (height,), kind) for name, kind in rowwise.items())
    buffers += tuple(
        Buffer(f"{name}_am", "am", ("r", "v"), (height, width), "fp16", 2) for name in ("logits", "grad")
    )
    over_v = Loop(
        "v",
        width,
        (
            Wait("logits>logits_am"),
            Dma("logits", "logits_am", ahead=True),
            Wait("grad_am>grad", keep=1),
            Kernel(
                "xent_gradient",
                tuple((name, f"{name}_am") for name in ("logits", "lse", "target", "dloss", "grad")),
                (("v", "v"),),
            ),
            Dma("grad_am", "grad"),
        ),
        rotates=("logits_am", "grad_am"),
    )
    loads: tuple[Statement, ...] = tuple(Dma(name, f"{name}_am") for name in rowwise)
    waits = tuple(Wait(f"{name}>{name}_am") for name in rowwise)
    body = Loop("r", height, (*loads, *waits, over_v), rotates=tuple(f"{name}_am" for name in rowwise))
    operands = tuple(Operand(name, ("r",), kind) for name, kind in rowwise.items())
    operands += tuple(Operand(name, ("r", "v"), "fp16") for name in ("logits", "grad"))
    return _dealt(
        chip,
        "cross_entropy_backward",
        extents,
        "r",
        operands,
        buffers,
        (body, Wait("grad_am>grad")),
        5 * rows * vocabulary,
    )


@lru_cache(maxsize=256)
def embedding_forward(chip: Chip, rows: int, vocabulary: int, width: int) -> Schedule:
    """Y[r] = W[ids[r]]: one row per transfer; the engine reads the index list itself (scatter-gather)."""
    extents = {"r": rows, "v": vocabulary, "h": width}
    fetch = Pick("v", "ids", "r", (Dma("W", "row_am"), Wait("W>row_am"), Wait("row_am>Y", keep=1)))
    body = Loop("r", 1, (fetch, Dma("row_am", "Y")), rotates=("row_am",))
    operands = (
        Operand("W", ("v", "h"), "fp16"),
        Operand("ids", ("r",), "i64"),
        Operand("Y", ("r", "h"), "fp16"),
    )
    buffers = (Buffer("row_am", "am", ("h",), (width,), "fp16", 3),)
    return _dealt(
        chip, "embedding_forward", extents, "r", operands, buffers, (body, Wait("row_am>Y")), rows * width
    )


@lru_cache(maxsize=256)
def embedding_backward(chip: Chip, rows: int, vocabulary: int, width: int) -> Schedule:
    """dW (FP32) = 0, then dW[ids[r]] += dY[r], row after row in order; cores divide the columns, so no two meet."""
    extents = {"r": rows, "v": vocabulary, "h": width}
    cores = min(chip.cores, ceil(width / chip.lanes_fp32))
    share = ceil(ceil(width / cores) / chip.lanes_fp32) * chip.lanes_fp32
    cores = ceil(width / share)
    height = max(1, min(vocabulary, TILE_BYTES // (4 * share)))
    clear = Loop(
        "v",
        height,
        (Wait("zero_am>dW", keep=1), Kernel("fill", (("out", "zero_am"),)), Dma("zero_am", "dW")),
        ("zero_am",),
    )
    update: tuple[Statement, ...] = (
        Dma("dW", "sum_am"),
        Wait("dW>sum_am"),
        Kernel("accumulate", (("src", "row_am"), ("dst", "sum_am"))),
        Dma("sum_am", "dW"),
        Wait("sum_am>dW"),
    )
    rows_loop = Loop(
        "r",
        1,
        (Wait("dY>row_am"), Dma("dY", "row_am", ahead=True), Pick("v", "ids", "r", update)),
        rotates=("row_am", "sum_am"),
    )
    operands = (
        Operand("dW", ("v", "h"), "fp32"),
        Operand("ids", ("r",), "i64"),
        Operand("dY", ("r", "h"), "fp16"),
    )
    buffers = (
        Buffer("zero_am", "am", ("v", "h"), (height, share), "fp32", 2),
        Buffer("row_am", "am", ("h",), (share,), "fp16", 2),
        Buffer("sum_am", "am", ("h",), (share,), "fp32"),
    )
    body = (Split("h", cores, (clear, Wait("zero_am>dW"), rows_loop), unit=chip.lanes_fp32),)
    return Schedule("embedding_backward", cores, extents, operands, buffers, body, rows * width, "fp16")


@lru_cache(maxsize=256)
def adamw(chip: Chip, elements: int, gradient: str = "fp16") -> Schedule:
    """One AdamW update of a shard: p, m, v (FP32) in place from gradient g; writes the FP16 view.

    Run with the values lr, beta1, beta2, eps, weight_decay, bias1 = 1 - beta1^t, bias2 = 1 - beta2^t, grad_scale.
    """
    state = {name: _rows(name, "i", "fp32") for name in ("p", "m", "v")}
    loads = {**state, "g": _rows("g", "i", gradient)}
    return _stream(chip, "adamw", {"i": elements}, "i", loads, {**state, "view": _rows("view", "i")})


@lru_cache(maxsize=256)
def bias_forward(chip: Chip, rows: int, width: int) -> Schedule:
    """Y = X + W by rows."""
    loads = {"x": _rows("X", "rh"), "w": _rows("W", "h")}
    return _stream(chip, "bias_forward", {"r": rows, "h": width}, "r", loads, {"y": _rows("Y", "rh")})


@lru_cache(maxsize=256)
def bias_backward(chip: Chip, rows: int, width: int) -> Schedule:
    """dW = column sums of dY."""
    extents = {"r": rows, "h": width}
    return _stream(
        chip, "bias_backward", extents, "r", {"dy": _rows("dY", "rh")}, {}, summed=("dw", _rows("dW", "h"))
    )


def _rows(name: str, dims: str, dtype: str = "fp16") -> Operand:
    return Operand(name, tuple(dims), dtype)


def _logit_tile(rows: int, vocabulary: int, chip: Chip) -> tuple[int, int]:
    height = max(1, min(32, ceil(rows / chip.cores)))
    return height, min(vocabulary, TILE_BYTES // (2 * height) // chip.lanes_fp32 * chip.lanes_fp32)


def _dealt(
    chip: Chip,
    name: str,
    extents: dict[str, int],
    dim: str,
    operands: tuple[Operand, ...],
    buffers: tuple[Buffer, ...],
    body: tuple[Statement, ...],
    flops: int,
) -> Schedule:
    """`body` on contiguous shares of `dim`, over as many cores as get one."""
    total = extents[dim]
    cores = ceil(total / ceil(total / chip.cores))
    return Schedule(name, cores, extents, operands, buffers, (Split(dim, cores, body),), flops, "fp16")


def _stream(
    chip: Chip,
    name: str,
    extents: dict[str, int],
    dim: str,
    loads: Operands,
    stores: Operands,
    values: Values = (),
    summed: tuple[str, Operand] | None = None,
) -> Schedule:
    """Load tiles of `dim` ahead, run one kernel, store its results; operands without `dim` are loaded once.

    `summed`: a result without `dim`, accumulated over the tiles and then over the cores. An operand in both
    `loads` and `stores` is updated in place.
    """
    cores = ceil(extents[dim] / ceil(extents[dim] / chip.cores))
    share = ceil(extents[dim] / cores)
    streamed = {role: o for role, o in (loads | stores).items() if dim in o.dims}
    fixed = {role: o for role, o in loads.items() if dim not in o.dims}
    widest = max(_unit_bytes(operand, extents, dim) for operand in streamed.values())
    tile = max(1, min(share, TILE_BYTES // widest))
    if dim == "i" and tile < share:
        tile = tile // chip.lanes_fp32 * chip.lanes_fp32
    held = {role: 3 if role in loads and role in stores else 2 for role in streamed}
    buffers = [
        _buffer(role, operand, {**extents, dim: tile}, held[role]) for role, operand in streamed.items()
    ]
    buffers += [_buffer(role, operand, extents, 1) for role, operand in fixed.items()]
    args = [(role, f"{role}_am") for role in loads | stores]
    opening: list[Statement] = [Dma(o.name, f"{role}_am") for role, o in fixed.items()]
    opening += [Wait(f"{o.name}>{role}_am") for role, o in fixed.items()]
    closing: list[Statement] = [Wait(f"{role}_am>{o.name}") for role, o in stores.items()]
    operands = {o.name: o for o in (*loads.values(), *stores.values())}
    if summed is not None:
        role, operand = summed
        opening.append(Kernel("fill", (("out", f"{role}_am"),)))
        args.append((role, f"{role}_am"))
        operands[operand.name] = operand
        buffers += _sum_buffers(role, operand, extents, cores)
        closing += _sum_over_cores(role, operand, extents, cores)
    body: list[Statement] = [Wait(f"{o.name}>{role}_am") for role, o in loads.items() if dim in o.dims]
    body += [Wait(f"{role}_am>{o.name}", keep=1) for role, o in stores.items()]
    body += [Dma(o.name, f"{role}_am", ahead=True) for role, o in loads.items() if dim in o.dims]
    body.append(Kernel(name, tuple(args), values=values))
    body += [Dma(f"{role}_am", o.name) for role, o in stores.items()]
    loop = Loop(dim, tile, tuple(body), rotates=tuple(f"{role}_am" for role in streamed))
    once = tuple(f"{role}_am" for role in fixed) + ((f"{summed[0]}_am", "R_gsm") if summed else ())
    inside: tuple[Statement, ...] = (*opening, loop, *closing)
    if once:
        # One pass over the whole width: the home of what is held throughout.
        inside = (Loop("h", extents["h"], inside, rotates=once),)
    work = extents[dim]
    for other in ("h", "head", "d"):
        work *= extents.get(other, 1) if other != dim else 1
    return Schedule(
        name=name,
        cores=cores,
        extents={**extents, **({"share": cores} if summed else {})},
        operands=tuple(operands.values()),
        buffers=tuple(buffers),
        body=(Split(dim, cores, inside),),
        flops=work,
        dtype="fp16",
        tiles={dim: tile},
    )


def _unit_bytes(operand: Operand, extents: dict[str, int], dim: str) -> int:
    size = DTYPE_BYTES[operand.dtype]
    for other in operand.dims:
        size *= extents[other] if other != dim else 1
    return size


def _buffer(role: str, operand: Operand, extents: dict[str, int], copies: int) -> Buffer:
    shape = tuple(extents[d] for d in operand.dims)
    return Buffer(f"{role}_am", "am", operand.dims, shape, operand.dtype, copies)


def _sum_buffers(role: str, operand: Operand, extents: dict[str, int], cores: int) -> list[Buffer]:
    (dim,) = operand.dims
    part = ceil(extents[dim] / cores)
    return [
        Buffer(f"{role}_am", "am", (dim,), (extents[dim],), "fp32"),
        Buffer("R_gsm", "gsm", ("share", dim), (cores, extents[dim]), "fp32", 1, cores),
        Buffer("R_am", "am", ("share", dim), (cores, part), "fp32"),
        Buffer("sum_am", "am", (dim,), (part,), "fp32"),
        Buffer("out_am", "am", (dim,), (part,), operand.dtype),
    ]


def _sum_over_cores(role: str, operand: Operand, extents: dict[str, int], cores: int) -> list[Statement]:
    (dim,) = operand.dims
    body = (
        Dma("R_gsm", "R_am"),
        Wait("R_gsm>R_am"),
        Kernel("sum_shares", (("src", "R_am"), ("dst", "sum_am"))),
        Kernel("cast", (("src", "sum_am"), ("dst", "out_am"))),
        Dma("out_am", operand.name),
        Wait(f"out_am>{operand.name}"),
    )
    mine = Loop(dim, ceil(extents[dim] / cores), body, rotates=("R_am", "sum_am", "out_am"))
    return [
        Split("share", cores, (Dma(f"{role}_am", "R_gsm"),)),
        Wait(f"{role}_am>R_gsm"),
        Barrier(),
        Split(dim, cores, (mine,)),
    ]
