"""GEMM schedules: right numbers, legal memory, and a model that agrees with the executor to the byte."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.errors import UserError
from ratrain.machine.mt3000.chip import load_chip
from ratrain.machine.mt3000.executor import execute
from ratrain.machine.mt3000.gemm import Problem
from ratrain.machine.mt3000.gemm_search import best_gemm
from ratrain.machine.mt3000.memory import NUMPY

MT, FT = load_chip("mt3000"), load_chip("ft_m7032")
BOUND = {"fp16": 1e-3, "fp32": 1e-5, "fp64": 1e-13}


def verify(chip, problem, cores=None, fixed=(), split="auto"):
    """Run the chosen schedule on fresh data with a poisoned result; returns the counters and the price."""
    cost = best_gemm(chip, problem, cores, tuple(fixed.items()) if fixed else (), split)
    random, dtype = np.random.default_rng(), NUMPY[problem.dtype]
    a = random.standard_normal((problem.m, problem.k)).astype(dtype)
    b = random.standard_normal((problem.k, problem.n)).astype(dtype)
    c = np.full((problem.m, problem.n), np.nan, dtype)
    stored = {
        "A": np.ascontiguousarray(a.T) if problem.trans == "tn" else a,
        "B": np.ascontiguousarray(b.T) if problem.trans == "nt" else b,
        "C": c,
    }
    counted = execute(cost.schedule, chip, stored)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(c - exact) / np.linalg.norm(exact)
    assert error < BOUND[problem.dtype]
    assert counted.bytes == cost.bytes
    assert counted.transfers == cost.transfers
    assert counted.cycles == pytest.approx(cost.cycles, rel=0.02)
    assert counted.compute_cycles[0] == cost.compute_cycles
    for level, peak in counted.peak.items():
        assert peak <= chip.capacity(level)
    assert counted.peak == cost.schedule.footprint(chip)
    if problem.dtype == "fp16":
        torchs = (torch.from_numpy(a) @ torch.from_numpy(b)).double().numpy()
        assert error < 2 * np.linalg.norm(torchs - exact) / np.linalg.norm(exact) + 1e-5
    return counted, cost


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 600),
    st.sampled_from(["nn", "nt", "tn"]),
    st.sampled_from([(MT, "fp16"), (MT, "fp16"), (MT, "fp32"), (FT, "fp64")]),
)
def test_any_shape_is_right_and_priced_exactly(m, n, k, trans, where) -> None:
    chip, dtype = where
    verify(chip, Problem(m, n, k, dtype, trans))


@pytest.mark.parametrize(
    ("chip", "problem", "cores", "fixed", "split"),
    [
        (MT, Problem(1, 4096, 512), None, {}, "auto"),  # one row
        (MT, Problem(5, 30011, 64, trans="nt"), None, {}, "auto"),  # a large ragged vocabulary
        (MT, Problem(300, 500, 700), None, {"KG": 128, "MG": 48}, "auto"),  # partial sums wait in DDR as FP32
        (MT, Problem(300, 500, 700, trans="nt"), None, {"KG": 256, "KA": 128}, "n"),
        (FT, Problem(500, 520, 512, "fp64"), 8, {"KG": 128, "KA": 64, "MG": 48, "MA": 24}, "auto"),
        (FT, Problem(150, 100, 3000, "fp64"), 8, {}, "k"),
        (MT, Problem(100, 70, 5000), None, {}, "k"),
        (FT, Problem(600, 100, 300, "fp64"), 8, {}, "m"),
    ],
)
def test_loop_orders_and_splits(chip, problem, cores, fixed, split) -> None:
    verify(chip, problem, cores, fixed, split)


def test_partial_sums_are_counted_at_their_width() -> None:
    """DDR bytes in closed form: A and B once per panel, C as FP32 out and in between depths, FP16 at the end."""
    problem = Problem(96, 768, 512)
    counted, cost = verify(MT, problem, fixed={"MG": 96, "KG": 128, "NA": 32}, split="n")
    assert cost.schedule.tiles["PN"] == 24
    spills = 512 // 128 - 1
    assert counted.bytes["ddr>gsm"] == 96 * 512 * 2
    assert counted.bytes["ddr>am"] == 512 * 768 * 2 + spills * 96 * 768 * 4
    assert counted.bytes["am>ddr"] == spills * 96 * 768 * 4 + 96 * 768 * 2


def test_the_schedule_can_be_read() -> None:
    text = str(best_gemm(MT, Problem(512, 512, 512)).schedule)
    assert "dma A_gsm -> A_sm (ahead)" in text
    assert "gemm(a=A_sm, b=B_am, c=C_am" in text
    assert "am C_am[m, n]" in text


@pytest.mark.parametrize(
    ("problem", "cores", "fixed", "says"),
    [
        (Problem(0, 8, 8), None, (), "M is 0"),
        (Problem(8, 8, 8), 25, (), "1 to 24 cores"),
        (Problem(8, 8, 8), None, (("XX", 8),), "tile XX=8"),
        (
            Problem(4096, 4096, 4096),
            None,
            (("MG", 4096), ("KG", 4096)),
            "no schedule with MG=4096, KG=4096 fits",
        ),
    ],
)
def test_bad_requests_are_refused(problem, cores, fixed, says) -> None:
    with pytest.raises(UserError, match=says):
        best_gemm(MT, problem, cores, fixed)
