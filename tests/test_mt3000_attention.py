"""Attention on the chip: exact to FP16, S x S never in DDR, traffic equal to the closed form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.errors import UserError
from ratrain.machine.mt3000.attention import (
    Blocks,
    Heads,
    attention_traffic,
    best_attention,
    build_backward,
    build_forward,
)
from ratrain.machine.mt3000.chip import load_chip
from ratrain.machine.mt3000.cost import price
from ratrain.machine.mt3000.executor import execute

CHIP = load_chip()
NAMES = ("O", "L", "dQ", "dK", "dV")


def draw(heads: Heads) -> dict[str, np.ndarray]:
    random = np.random.default_rng()
    by_query = (heads.kv_heads, heads.group, heads.queries, heads.d)
    by_key = (heads.kv_heads, heads.keys, heads.d)
    shapes = {"Q": by_query, "dO": by_query, "K": by_key, "V": by_key}
    return {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def torch_results(heads: Heads, given_: dict[str, np.ndarray], dtype: torch.dtype) -> list[np.ndarray]:
    q, k, v, upstream = (torch.from_numpy(given_[name]).to(dtype) for name in ("Q", "K", "V", "dO"))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = torch.einsum("bgqd,btd->bgqt", q, k) * heads.d**-0.5
    if heads.causal:
        late = (
            torch.arange(heads.keys)[None] > torch.arange(heads.queries)[:, None] + heads.keys - heads.queries
        )
        scores = scores.masked_fill(late, float("-inf"))
    o = torch.einsum("bgqt,btd->bgqd", torch.softmax(scores, -1), v)
    o.backward(upstream)
    return [x.detach().double().numpy() for x in (o, torch.logsumexp(scores, -1), q.grad, k.grad, v.grad)]


def verify(heads: Heads, forward, backward) -> None:
    data = draw(heads)
    out = {
        name: np.full_like(data["Q" if name in "OdQ" else "K"], np.nan) for name in ("O", "dQ", "dK", "dV")
    }
    out["L"] = np.full(data["Q"].shape[:3], np.nan, np.float32)
    for cost, is_backward in ((forward, False), (backward, True)):
        counted = execute(cost.schedule, CHIP, data | out)
        assert counted.bytes == cost.bytes
        assert counted.cycles == pytest.approx(cost.cycles, rel=0.02)
        moved = sum(size for path, size in counted.bytes.items() if "ddr" in path)
        assert moved == attention_traffic(heads, Blocks(**cost.schedule.tiles), is_backward)
    exact = torch_results(heads, data, torch.float64)
    half = torch_results(heads, data, torch.float16)
    for name, right, rough in zip(NAMES, exact, half):
        size = np.linalg.norm(right)
        error, other = np.linalg.norm(out[name] - right), np.linalg.norm(rough - right)
        # With very few keys dP and D nearly cancel, and FP16's rounding of O is all that remains of dQ and dK.
        floor = 1e-3 * max(size, 0.5 * np.linalg.norm(data["dO"].astype(np.float64)))
        assert error <= floor, name
        if heads.keys >= 16:
            assert error <= 2 * other + 0.1 * floor, name


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 150),
    st.integers(0, 60),
    st.sampled_from([64, 80, 128, 256]),
    st.booleans(),
)
def test_any_shape(kv_heads, group, queries, more, d, causal) -> None:
    heads = Heads(kv_heads, group, queries, queries + more, d, causal)
    verify(heads, best_attention(CHIP, heads, False), best_attention(CHIP, heads, True))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("more", [0, 30])
def test_rounds_of_rows_and_shared_heads(group: int, causal: bool, more: int) -> None:
    """More rows than a group holds at a time: dK and dV wait in DDR between rounds and query heads."""
    heads, blocks = Heads(2, group, 200, 200 + more, 64, causal), Blocks(2, 2, 32, 48, 24)
    verify(
        heads,
        price(build_forward(CHIP, heads, blocks), CHIP),
        price(build_backward(CHIP, heads, blocks), CHIP),
    )


@pytest.mark.parametrize(
    ("queries", "d", "group"), [(1, 64, 8), (2048, 128, 1), (2048, 128, 8), (8192, 128, 2), (8192, 256, 1)]
)
def test_every_length_fits_and_moves_what_the_closed_form_says(queries: int, d: int, group: int) -> None:
    heads = Heads(4, group, queries, queries, d)
    for backward in (False, True):
        cost = best_attention(CHIP, heads, backward)
        assert cost.schedule.fits(CHIP)
        assert cost.ddr_bytes == attention_traffic(heads, Blocks(**cost.schedule.tiles), backward)
        assert not any({"q", "t"} <= set(operand.dims) for operand in cost.schedule.operands)


def test_residency_of_one_head_at_2048() -> None:
    """24 cores of 86 rows on one head: all of it in GSM and AM, DDR sees each operand once."""
    heads, blocks = Heads(1, 1, 2048, 2048, 128), Blocks(1, 24, 96, 128, 60)
    cost = price(build_backward(CHIP, heads, blocks), CHIP)
    assert cost.schedule.fits(CHIP)
    assert cost.ddr_bytes == 8 * 2048 * 128 * 2 + 2048 * 4


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(UserError, match="at least as many keys"):
        best_attention(CHIP, Heads(1, 1, 8, 4, 64), False)
    with pytest.raises(UserError, match="d is 0"):
        best_attention(CHIP, Heads(1, 1, 8, 8, 0), False)
    with pytest.raises(UserError, match="no schedule fits"):
        best_attention(CHIP, Heads(1, 1, 64, 64, 100_000), True)
