"""What a core computes on its scratchpads: each kernel's cycles. Results are in `numerics`.

Micro-kernel cycles follow NUDT's published FP64 kernel, `6k + 26` for 6 x k x 48, from its cause: eighteen
accumulators on three FMA units, 26 cycles to fill and drain. The same rule prices other widths, dtypes and
ragged edges. Row kernels are priced as vector operations: the slowest of loads, stores and arithmetic.
"""

from __future__ import annotations

from math import ceil

from ratrain.machine.mt3000.chip import DTYPE_BYTES, Chip
from ratrain.machine.mt3000.schedule import Env, Kernel, Schedule

# Vector kernels: (role whose region sets the work, vectors loaded, vectors stored, operations) per FP32 vector
# of that region. An exponential is counted as 12 operations (range reduction and a polynomial of degree 6), a
# reciprocal or root as 6 (estimate and Newton steps). Our own instruction counts, not measured.
VECTOR_WORK: dict[str, tuple[str, float, float, float]] = {
    "fill": ("out", 0, 1, 0),
    "cast": ("src", 1, 1, 1),
    "scale": ("x", 1, 1, 1),
    "sum_shares": ("src", 1, 0.1, 1),
    "accumulate": ("src", 2, 1, 1),
    "online_softmax": ("s", 2, 1, 17),
    "finish_softmax": ("acc", 1, 1, 2),
    "probability": ("s", 1, 1, 14),
    "row_dot": ("a", 2, 0, 2),
    "score_gradient": ("dp", 2, 1, 3),
    "rmsnorm_forward": ("x", 2, 1, 5),
    "rmsnorm_backward": ("x", 5, 2, 10),
    "rotary": ("x", 2, 1, 4),
    "swiglu_forward": ("gate", 2, 1, 20),
    "swiglu_backward": ("gate", 3, 2, 28),
    "bias_forward": ("x", 2, 1, 1),
    "bias_backward": ("dy", 2, 1, 1),
    "add": ("a", 2, 1, 1),
    "xent_statistics": ("logits", 1, 0, 16),
    "xent_finish": ("total", 3, 2, 20),
    "xent_gradient": ("logits", 1, 1, 15),
    "adamw": ("p", 4, 4, 22),
}


def kernel_cycles(chip: Chip, schedule: Schedule, kernel: Kernel, env: Env) -> int:
    """Cycles of one call on the regions that `env` names; 0 where a region is empty."""
    args = dict(kernel.args)
    if kernel.name == "gemm":
        dims = dict(kernel.dims)
        m, n, k = (len(env[dims[role]]) for role in "mnk")
        direct_nt = schedule.places[args["b"]].dims[-1] == dims["k"]
        return gemm_cycles(chip, schedule.places[args["a"]].dtype, m, n, k, direct_nt)
    if kernel.name == "transpose":
        place = schedule.places[args["dst"]]
        rows, columns = (len(env[dim]) for dim in place.dims)
        if not rows or not columns:
            return 0
        vectors = rows * ceil(columns / chip.lanes_fp32)
        return ceil(vectors * chip.transpose_cycles_per_vector) + chip.start_cycles
    role, loads, stores, operations = VECTOR_WORK[kernel.name]
    lengths = [len(env[dim]) for dim in schedule.places[args[role]].dims]
    if not all(lengths):
        return 0
    lanes = chip.lanes_fp64 if schedule.dtype == "fp64" else chip.lanes_fp32
    vectors = ceil(lengths[-1] / lanes)
    for length in lengths[:-1]:
        vectors *= length
    slowest = max(
        loads * chip.vector_bytes / chip.am_load_bytes_per_cycle,
        stores * chip.vector_bytes / chip.am_store_bytes_per_cycle,
        operations / chip.fma_units,
    )
    return ceil(vectors * slowest) + chip.start_cycles


def gemm_cycles(chip: Chip, dtype: str, m: int, n: int, k: int, direct_nt: bool) -> int:
    """C[m,n] += A[m,k] B[k,n] with A in SM, B and C in AM.

    Columns go in vectors, at most `max_vectors` side by side, rows in blocks of `rows`. Each step of k costs
    the slowest of multiply-adds, broadcasting the scalars of A, and loading the vectors of B. `direct_nt`: B is
    stored [n,k], vectors run along k and every output ends with a sum over its lanes.
    """
    if not (m and n and k):
        return 0
    lanes = chip.lanes(dtype)
    if direct_nt:
        calls = ceil(m / chip.rows) * ceil(n / (chip.fma_units * lanes))
        steps = m * n * ceil(k / lanes) / chip.fma_units
        return ceil((steps + m * n * chip.lane_sum_cycles + calls * chip.start_cycles) / chip.efficiency)
    vectors = ceil(n / lanes)
    blocks = ceil(vectors / chip.max_vectors)
    narrow, wider = divmod(vectors, blocks)
    total = 0.0
    for rows, row_blocks in ((chip.rows, m // chip.rows), (m % chip.rows, 1)):
        if not rows or not row_blocks:
            continue
        for width, column_blocks in ((narrow, blocks - wider), (narrow + 1, wider)):
            step = max(
                rows * width / chip.fma_units,
                rows * DTYPE_BYTES[dtype] / chip.broadcast_bytes_per_cycle,
                width * chip.vector_bytes / chip.am_load_bytes_per_cycle,
            )
            total += row_blocks * column_blocks * (step * k + chip.start_cycles)
    return ceil(total / chip.efficiency)
