"""What operators take on a GPU: arithmetic, memory traffic, and the host that launches them.

A roofline with additive legs, after Williams, Waterman and Patterson, "Roofline", CACM 2009: an operator's
seconds are FLOPs / rate + bytes / memory bandwidth. Since a matmul's bytes against its FLOPs grow as 1/m +
1/n + 1/k, small or thin matmuls (few tokens, many tensor-parallel ranks) come out less efficient without a
further constant. A small layer is bound by the host, which launches its kernels one by one. The constants
are in the platform file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratrain.errors import UserError
from ratrain.machine.platform import Device


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read and written in device memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __rmul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.bytes)


def matmul(m: float, n: float, k: float, element_bytes: float = 2) -> Work:
    """An (m x k) by (k x n) product: two inputs read and the output written once."""
    return Work(2.0 * m * n * k, element_bytes * (m * n + n * k + m * k))


@dataclass(frozen=True)
class RooflineParameters:
    """What the `roofline` operator model reads from a platform file.

    `memory_gb_per_s`: attainable memory bandwidth, 1e9 bytes/s. `layer_pass_launch_us`: host microseconds
    to launch one layer's kernels, one pass (forward or recovery; a backward is two).
    `launch_overlap_exponent`: how sharply the slower of host and device decides, p in (host^p +
    device^p)^(1/p).
    """

    memory_gb_per_s: float
    layer_pass_launch_us: float
    launch_overlap_exponent: float


@dataclass(frozen=True)
class GpuOperators:
    """Prices `Work` on one device: FLOP/s, bytes/s, and seconds a layer pass takes the host."""

    matmul_rate: float
    memory_bandwidth: float
    layer_pass_launch: float
    overlap_exponent: float

    @classmethod
    def of(cls, device: Device, dtype: str) -> GpuOperators:
        """The model of a `roofline` device; UserError for another operator model or an unknown dtype."""
        if device.operator_model.name != "roofline":
            raise UserError(f"{device.name} is priced by {device.operator_model.name!r}, not by 'roofline'")
        p = device.operator_model.read(RooflineParameters)
        return cls(
            device.rate("matmul", dtype),
            p.memory_gb_per_s * 1e9,
            p.layer_pass_launch_us * 1e-6,
            p.launch_overlap_exponent,
        )

    def seconds(self, work: Work) -> float:
        """Device seconds of `work`."""
        return work.flops / self.matmul_rate + work.bytes / self.memory_bandwidth

    def layer_seconds(self, work: Work, passes: float) -> float:
        """Seconds of one layer's `work` in `passes` passes, launched by the host as the device computes."""
        p = self.overlap_exponent
        device, host = self.seconds(work), passes * self.layer_pass_launch
        return (device**p + host**p) ** (1 / p)
