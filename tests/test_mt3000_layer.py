"""The rest of a layer on the chip, forward and backward, against torch in FP64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ratrain.machine.mt3000.chip import Chip, load_chip
from ratrain.machine.mt3000.cost import price
from ratrain.machine.mt3000.executor import execute
from ratrain.machine.mt3000.torch_operators import Mt3000

CHIP = load_chip()


class Checked(Mt3000):
    """Also holds every schedule against its price."""

    def run(self, operator, schedule, tensors, values=None) -> None:
        counted = execute(schedule, CHIP, {n: t.detach().numpy() for n, t in tensors.items()}, values)
        cost = price(schedule, CHIP)
        assert counted.bytes == cost.bytes, operator
        assert counted.cycles == pytest.approx(cost.cycles, rel=0.02), operator


def compare(
    mine: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor, bound: float = 1e-3
) -> None:
    """Results and all gradients of `mine` on FP16 against `exact` on FP64 copies of the same numbers."""
    halves = [x.half().requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in halves]
    got, right = mine(*halves), exact(*doubles)
    upstream = torch.randn(got.shape).to(got.dtype)
    got.backward(upstream)
    right.backward(upstream.double())
    pairs = [(got, right), *((a.grad, b.grad) for a, b in zip(halves, doubles))]
    for position, (a, b) in enumerate(pairs):
        error = (a.detach().double() - b.detach()).norm() / b.detach().norm()
        assert error < bound, position


shapes = given(st.integers(1, 70), st.integers(8, 300))  # of one number, a norm's gradient is rounding only


@settings(max_examples=8, deadline=None)
@shapes
def test_rms_norm(rows: int, width: int) -> None:
    def exact(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    compare(lambda x, w: Checked().rms_norm(x, w, 1e-5), exact, torch.randn(rows, width), torch.randn(width))


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.sampled_from([2, 64, 80]))
def test_rotary(rows: int, heads: int, d: int) -> None:
    angles = torch.rand(rows, d // 2) * 6
    cos, sin = angles.cos(), angles.sin()

    def exact(x: Tensor) -> Tensor:
        low, high = x[..., : d // 2], x[..., d // 2 :]
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    compare(lambda x: Checked().rotary(x, cos, sin), exact, torch.randn(rows, heads, d))


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 200_000))
def test_swiglu_and_residual(elements: int) -> None:
    gate, up = torch.randn(elements), torch.randn(elements)
    compare(lambda a, b: Checked().swiglu(a, b), lambda a, b: torch.nn.functional.silu(a) * b, gate, up)
    compare(lambda a, b: Checked().add(a, b), torch.add, gate, up)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_linear(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    tensors = [torch.randn(rows, inputs), torch.randn(outputs, inputs)]
    if biased:
        tensors.append(torch.randn(outputs))
    compare(lambda *t: Checked().linear(*t), lambda *t: torch.nn.functional.linear(*t), *tensors)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 80), st.integers(1, 400), st.integers(1, 100))
def test_embedding(rows: int, vocabulary: int, width: int) -> None:
    ids = torch.randint(0, vocabulary, (rows,))
    compare(
        lambda w: Checked().embedding(ids, w),
        lambda w: torch.nn.functional.embedding(ids, w),
        torch.randn(vocabulary, width),
    )


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 60), st.integers(2, 9000))
def test_cross_entropy_in_tiles_of_the_vocabulary(rows: int, vocabulary: int) -> None:
    targets = torch.randint(0, vocabulary, (rows,))
    targets[0] = vocabulary - 1
    if rows > 2:
        targets[1] = -100
    compare(
        lambda x: Checked().cross_entropy(x, targets),
        lambda x: torch.nn.functional.cross_entropy(x, targets, reduction="none"),
        3 * torch.randn(rows, vocabulary),
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_adamw_is_torchs(kind: torch.dtype) -> None:
    size = 70_001
    parameter = torch.nn.Parameter(torch.randn(size))
    p, m, v = parameter.detach().clone(), torch.zeros(size), torch.zeros(size)
    view = torch.empty(size, dtype=torch.float16)
    hyper = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer, chip = torch.optim.AdamW([parameter], **hyper), Checked()
    for step in (1, 2, 3):
        gradient = torch.randn(size).to(kind)
        parameter.grad = gradient.float() / 8
        optimizer.step()
        chip.adamw_(p, m, v, gradient, view, step=step, grad_scale=1 / 8, **hyper)
    torch.testing.assert_close(p, parameter.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(view, p.half())


def test_streams_move_each_operand_once() -> None:
    chip: Chip = CHIP
    from ratrain.machine.mt3000 import layer

    elements = 1_000_003
    assert price(layer.swiglu_forward(chip, elements), chip).ddr_bytes == 3 * 2 * elements
    assert price(layer.adamw(chip, elements), chip).ddr_bytes == elements * (6 * 4 + 2 * 2)
    rows, vocabulary = 100, 50_257
    cost = price(layer.cross_entropy_forward(chip, rows, vocabulary), chip)
    assert cost.ddr_bytes == 2 * rows * vocabulary + rows * (8 + 4 + 4)
    assert cost.bound == "DDR"
    assert np.isfinite(cost.seconds)
