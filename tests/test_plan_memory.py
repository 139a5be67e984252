"""The memory model: the paper's accounting, units and padding, and the closed peak against the program's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.plan.activations import ActivationModel
from ratrain.plan.memory import (
    StateModel,
    activation_model,
    activation_peak,
    breakdown,
    footprints,
    grouped_bound,
    memory_program,
)
from ratrain.plan.plan import uniform_rungs
from ratrain.plan.precision import Precision
from ratrain.program.layout import RUNGS
from ratrain.program.memory import in_flight, peak
from ratrain.program.passes import PASSES
from ratrain.run_folder import check_programs
from test_plan_plan import make_plan, tiny_spec

SPEC = tiny_spec()


def states(spec: ModelSpec, precision: Precision, data: int, zero: int) -> StateModel:
    return StateModel(spec, precision, data, 1, zero, "torch", 0, 0, False, False)


def test_paper_accounting_of_16_bit_views() -> None:
    """2, 2 and 12 bytes a parameter, each sharded or not by the ZeRO level."""
    half = Precision("fp16", "fp16", "fp16")
    psi = SPEC.parameter_count()
    for zero, bytes_of in {
        0: 16 * psi,
        1: 4 * psi + 12 * psi / 4,
        2: 2 * psi + 14 * psi / 4,
        3: 16 * psi / 4,
    }.items():
        m = states(SPEC, half, 4, zero).stage(SPEC.layers, True, True)
        assert m.views + m.gradients + m.shard == bytes_of


def test_fp32_master_is_a_slice_of_the_view() -> None:
    psi = SPEC.parameter_count()
    m = states(SPEC, Precision("fp32", "fp32", "fp32"), 4, 1).stage(SPEC.layers, True, True)
    assert (m.views, m.gradients, m.shard) == (4 * psi, 4 * psi, 8 * psi / 4)


def test_tensor_ranks_hold_a_sum_and_what_they_receive_for_it() -> None:
    def communication(tensor: int) -> int:
        model = replace(states(SPEC, Precision("fp32", "fp32", "fp32"), 1, 1), tensor=tensor, message=1024)
        return model.stage(SPEC.layers, True, True).communication

    assert [communication(tensor) for tensor in (1, 2, 4)] == [0, 1024 + 512, 1024 + 768]


def test_units_are_padded_to_the_replicas() -> None:
    m = states(SPEC, Precision("fp32", "fp32", "fp32"), 7, 1)
    count = sum(p.size for p in SPEC.parameters("layer0"))
    assert count % 7 and m.padded("layer0") == count + 7 - count % 7


def test_tied_matrix_is_held_by_both_stages_and_once_by_a_single_one() -> None:
    tied = tiny_spec(tie_word_embeddings=True)
    model = states(tied, Precision("fp32", "fp32", "fp32"), 1, 1)
    matrix = 4 * tied.vocab * tied.hidden
    first, last = model.stage(2, True, False), model.stage(2, False, True)
    alone = model.stage(4, True, True)
    assert first.views + last.views - alone.views == matrix


def test_logits_are_on_the_last_stage_only() -> None:
    """BC-36: fp32 logits of 4096 x 152064 are 2.320 GiB, and their gradient besides under 16-bit views."""
    spec = tiny_spec(vocab_size=152064, max_position_embeddings=4096)
    plan = make_plan(spec, layers=(2, 2), seq_len=4096, view="fp32", grad="fp32", reduce="fp32")
    first, last = breakdown(spec, plan)
    assert first.logits == 0
    assert round(last.logits / 2**30, 3) == 2.320
    half = make_plan(spec, layers=(2, 2), seq_len=4096, view="bf16", grad="fp32", reduce="fp32")
    assert breakdown(spec, half)[1].logits == last.logits * 3 / 2


def test_in_flight_micro_batches_do_not_grow_with_the_batch() -> None:
    """BC-36."""
    for microbatches, expected in {8: [4, 3, 2, 1], 2: [2, 2, 2, 1], 32: [4, 3, 2, 1]}.items():
        plan = make_plan(SPEC, layers=(1, 1, 1, 1), global_batch=microbatches)
        assert [in_flight(plan.program(), s) for s in range(4)] == expected


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_closed_peak_is_the_programs(data: st.DataObject) -> None:
    """Both the short program's and the closed form's peak equal the whole program's; with grouped ends the closed
    form bounds it."""
    stages = data.draw(st.integers(1, 4))
    counts = tuple(data.draw(st.integers(1, 3)) for _ in range(stages))
    spec = tiny_spec(num_hidden_layers=sum(counts))
    passes = data.draw(
        st.sampled_from([(), ("layerwise_sync",), tuple(PASSES)[1:], ("grouped_ends",), tuple(PASSES)])
    )
    rung = data.draw(st.sampled_from(RUNGS))
    plan = make_plan(
        spec,
        layers=counts,
        global_batch=data.draw(st.integers(1, 14)),
        rungs=uniform_rungs(counts, rung),
        ahead=data.draw(st.integers(0, 3)),
        elide=data.draw(st.booleans()),
        passes=passes,
        grouped=data.draw(st.sampled_from([1, 1, 2, 3, 20])),
    )
    program, short = plan.program(), memory_program(plan)
    forward_side = "forward_side_recovery" in passes
    activations = activation_model(spec, plan)
    for s, footprint in enumerate(footprints(spec, plan)):
        exact = peak(program, s, footprint).activations
        assert peak(short, s, footprint).activations == exact
        blocks = plan.layout().stages[s]
        held = plan.layout().in_flight(s, program.grouped)
        kept = [activations.saved(b, plan.layout().rung(s, b)) for b in blocks]
        whole = [activations.saved(b, "keep") for b in blocks]
        closed = activation_peak(
            kept,
            whole,
            [activations.working(b) for b in blocks],
            held,
            plan.ahead if forward_side else None,
            forward_side and plan.elide and held == 1,
        )
        if program.grouped == 1:
            assert closed == exact, (s, plan)
        else:
            bound = grouped_bound(closed, kept, whole, program.grouped, plan.ahead, activations.message)
            assert exact <= bound, (s, plan)
            if rung == "keep":
                assert bound - exact <= (program.grouped - 1) * activations.message


def test_fused_operators_save_less() -> None:
    """The MT-3000 backend's layer holds 8 hidden and 3 intermediate vectors a token, and attention's rows."""
    model = ActivationModel(SPEC, "mt3000", 1, 64, 2, 2, 0)
    tokens, kv = 64, SPEC.kv_width
    vectors = 4 * SPEC.hidden + 2 * SPEC.query_width + 2 * kv + 3 * SPEC.intermediate
    assert model.saved("layer0", "keep") == tokens * vectors * 2 + SPEC.heads * tokens * 4


@pytest.mark.parametrize("passes", [(), tuple(PASSES)])
def test_a_settled_step_is_refused_for_the_same_budget_as_the_whole(passes: tuple[str, ...]) -> None:
    spec = tiny_spec(num_hidden_layers=8)
    plan = make_plan(spec, layers=(3, 3, 2), global_batch=40, passes=passes, ahead=1)
    need = max(memory.total for memory in breakdown(spec, plan))
    for whole in (True, False):
        check_programs(plan.with_(budget=need), spec, whole=whole)
        with pytest.raises(UserError, match=f"needs {need} bytes"):
            check_programs(plan.with_(budget=need - 1), spec, whole=whole)
    assert plan.settled < plan.micro_batches
