"""Published measurements to hold the cost model against, and what it says for each.

FT-M7032 points are FP64, in percent of 172.8 GFLOP/s per core, from NUDT's GEMM reports; none enters a
prediction, and the chip file fits one value, the DDR rate, to two of them. The MT-3000 point fits its kernel's
efficiency.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratrain.machine.mt3000.chip import Chip, load_chip
from ratrain.machine.mt3000.cost import price
from ratrain.machine.mt3000.gemm import Problem, Tiles, build_gemm
from ratrain.machine.mt3000.gemm_search import best_gemm
from ratrain.machine.mt3000.kernels import gemm_cycles


@dataclass(frozen=True)
class Point:
    """One comparison, both in percent of peak."""

    label: str
    measured: float
    predicted: float

    @property
    def difference(self) -> float:
        return self.predicted - self.measured


def micro_kernel_percent(chip: Chip, dtype: str, m: int, n: int, k: int, direct_nt: bool = False) -> float:
    """Rate of one micro-kernel call, its operands in place."""
    cycles = gemm_cycles(chip, dtype, m, n, k, direct_nt)
    return 100 * 2 * m * n * k / cycles / chip.flops_per_cycle(dtype)


def ft_m7032_points(chip: Chip | None = None) -> list[Point]:
    chip = chip or load_chip("ft_m7032")
    points = []
    for k, measured in ((64, 92.0), (512, 98.9), (1024, 99.5)):
        points.append(
            Point(f"micro-kernel NN, k = {k}", measured, micro_kernel_percent(chip, "fp64", 6, 48, k))
        )
    for k, measured in ((64, 30.3), (2048, 93.2)):
        percent = micro_kernel_percent(chip, "fp64", 6, 48, k, direct_nt=True)
        points.append(Point(f"micro-kernel NT, k = {k}", measured, percent))
    large = Problem(6048, 6144, 4096, "fp64")
    for ka, na, ms, ma, mg, measured in (
        (128, 192, 24, 72, 6048, 92),
        (256, 96, 12, 144, 3024, 94),
        (512, 48, 6, 252, 1512, 96),
    ):
        cost = price(build_gemm(chip, large, Tiles(mg, ka, na, ma, ka, ms)), chip, 1)
        points.append(Point(f"1 core NN, KA = {ka}, NA = {na}, MA = {ma}", measured, cost.percent_of_peak))
    wide = Problem(144, 12288, 4096, "fp64")
    for label, measured, tiles in (
        ("KG = 512", 56.7, Tiles(144, 512, 64, 144, 512, 6, PN=8)),
        (
            "KG = 2048, C double-buffered",
            81.6,
            Tiles(144, 2048, 64, 144, 512, 6, PN=8, c_copies=2, c_resident=True),
        ),
        (
            "KG = 2048, C triple-buffered",
            81.0,
            Tiles(144, 2048, 64, 144, 512, 6, PN=8, c_copies=3, c_resident=True),
        ),
    ):
        cost = price(build_gemm(chip, wide, tiles), chip, 8)
        points.append(Point(f"8 cores over N, {label}", measured, cost.percent_of_peak))
    return points


def mt3000_point(chip: Chip | None = None) -> Point:
    """FP16 linear 8192 x 4096 x 4096 at 5686.34 GFLOP/s of 8.1 TFLOP/s."""
    chip = chip or load_chip()
    cost = best_gemm(chip, Problem(8192, 4096, 4096))
    return Point("FP16 8192 x 4096 x 4096", 100 * 5686.34e9 / chip.peak("fp16"), cost.percent_of_peak)
