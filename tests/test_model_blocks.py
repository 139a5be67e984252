"""Blocks, segments and gradient accumulation against plain transformers models."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

from model_chain import BATCH, SEQ, Chain, assert_close_gradients, batch
from ratrain.errors import UserError
from ratrain.model.blocks import bind, build_block, build_positions, initial_value
from ratrain.model.families import hf_config
from ratrain.model.head import LogitsPool, head_loss
from ratrain.model.segment import forward
from ratrain.model.spec import RUNGS, ModelSpec

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
QWEN2 = TINY | {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL = TINY | {"architectures": ["MistralForCausalLM"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "llama-tied": TINY | {"tie_word_embeddings": True},
    "llama-biases": TINY | {"attention_bias": True, "mlp_bias": True},
    "llama-padding-row": TINY | {"pad_token_id": 3},
    "llama-no-kv-key": {key: value for key, value in TINY.items() if key != "num_key_value_heads"},
    "llama-head-dim": TINY | {"head_dim": 32},
    "llama3-rope": TINY
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2-tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen2-window-off": QWEN2 | {"use_sliding_window": False, "sliding_window": 8},
    "qwen2-window-on": QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": MISTRAL | {"sliding_window": None},
    "mistral-window": MISTRAL | {"sliding_window": 8},
}
MODELS = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "mistral": MistralForCausalLM}


def reference(spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = MODELS[spec.family](hf_config(spec)).to(dtype)
    state = dict(weights)
    if spec.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_loss_and_gradients_equal_transformers(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_dict(config)
    chain = Chain(spec)
    model = reference(spec, chain.weights)
    data = [batch(0), batch(1)]
    loss = chain.step(data)

    logits = [model(input_ids=ids, use_cache=False).logits for ids, _ in data]
    targets = torch.cat([targets for _, targets in data])
    expected = nn.functional.cross_entropy(torch.cat(logits).flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    assert_close_gradients(chain.grads, gradients(model), 1e-5)

    torch.testing.assert_close(chain.logits(data[0][0]), logits[0].detach(), rtol=1e-4, atol=1e-4)


def test_fp64_gradients_equal_transformers() -> None:
    spec = ModelSpec.from_dict(TINY)
    chain = Chain(spec, torch.float64)
    model = reference(spec, chain.weights, torch.float64)
    ids, targets = batch()
    loss = chain.step([(ids, targets)])
    expected = nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert_close_gradients(chain.grads, gradients(model), 1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_recovered_gradients_are_bitwise_those_kept(dropout: float, dtype: torch.dtype) -> None:
    spec = ModelSpec.from_dict(TINY | {"attention_dropout": dropout})
    results = {}
    for rung in RUNGS:
        chain = Chain(spec, dtype)
        results[rung] = (chain.step([batch(0), batch(1)], rung), chain.grads)
    for rung in RUNGS:
        assert torch.equal(results[rung][0], results["keep"][0])
        for name, gradient in results["keep"][1].items():
            assert torch.equal(results[rung][1][name], gradient), (rung, name)
            assert gradient.isfinite().all(), name


def test_dropout_masks_follow_the_seed() -> None:
    spec = ModelSpec.from_dict(TINY | {"attention_dropout": 0.5})
    chain = Chain(spec)
    x = torch.randn(BATCH, SEQ, spec.hidden)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(forward(chain.blocks[1], (x,), "inputs", grad=False)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("rung", RUNGS)
def test_a_frozen_embedding_leaves_all_other_gradients(rung: str) -> None:
    spec = ModelSpec.from_dict(TINY)
    free, frozen = Chain(spec), Chain(spec, frozen=("model.embed_tokens.weight",))
    free.step([batch()], rung)
    frozen.step([batch()], rung)
    assert frozen.grads.pop("model.embed_tokens.weight").isnan().all()
    for name, gradient in frozen.grads.items():
        assert torch.equal(gradient, free.grads[name]), name


def test_without_main_grad_gradients_are_autograds() -> None:
    spec = ModelSpec.from_dict(CONFIGS["llama-biases"])
    own, plain = Chain(spec), Chain(spec, main_grads=False, own_head=False)
    own.step([batch()])
    plain.step([batch()])
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(parameter.grad, own.grads[name], rtol=1e-4, atol=1e-7)


def test_accumulation_in_fp32_under_bf16_views() -> None:
    spec = ModelSpec.from_dict(TINY)
    first, second, both = (Chain(spec, torch.bfloat16, grad_dtype=torch.float32) for _ in range(3))
    first.step([batch(0)])
    second.step([batch(1)])
    both.step([batch(0), batch(1)])
    assert all(parameter.grad is None for parameter in both.parameters.values())
    # Both micro-batches have as many targets, so the step's gradient is the mean of theirs, not rounded to bf16.
    for name, gradient in both.grads.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(
            gradient, (first.grads[name] + second.grads[name]) / 2, rtol=1e-5, atol=1e-9
        )
    assert any((gradient != gradient.bfloat16()).any() for gradient in both.grads.values())


@pytest.mark.parametrize("slice_tokens", [1, 7, 64, 1000])
def test_a_sliced_head_gives_the_same_loss_and_gradients(slice_tokens: int) -> None:
    spec = ModelSpec.from_dict(TINY)
    whole, sliced = Chain(spec), Chain(spec, slice_tokens=slice_tokens)
    torch.testing.assert_close(sliced.step([batch()]), whole.step([batch()]), rtol=1e-6, atol=1e-6)
    for name, gradient in whole.grads.items():
        torch.testing.assert_close(sliced.grads[name], gradient, rtol=1e-4, atol=1e-7)


def test_no_targets_give_zero_loss_and_gradients() -> None:
    spec = ModelSpec.from_dict(TINY)
    chain = Chain(spec)
    ids, targets = batch()
    loss = chain.step([(ids, targets.fill_(-100)), batch(1)])
    other = Chain(spec)
    assert torch.equal(loss, other.step([batch(1)]))
    for name, gradient in other.grads.items():
        torch.testing.assert_close(chain.grads[name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("end", ["backward", "release"])
def test_a_finished_segment_frees_its_tensors(rung: str, end: str) -> None:
    chain = Chain(ModelSpec.from_dict(TINY))
    layer = chain.blocks[1]
    gc.disable()
    try:
        x = torch.randn(BATCH, SEQ, 64)
        alive = weakref.ref(x.untyped_storage())
        kept: list[weakref.ref[Any]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(weakref.ref(t.untyped_storage())), t.detach())[1], lambda t: t
        ):
            output, segment = forward(layer, (x,), rung, grad=True)
            segment.recover()
        del x
        if end == "backward":
            segment.backward(torch.ones_like(output))
        else:
            segment.release()
        del segment
        parameters = {p.untyped_storage()._cdata for p in chain.parameters.values()}
        tables = {t.untyped_storage()._cdata for t in (layer.positions.cos, layer.positions.sin)}
        left = [ref() for ref in kept]
        assert alive() is None
        assert len(left) > 10
        assert all(s is None or s._cdata in parameters | tables for s in left)
    finally:
        gc.enable()


def test_backward_without_recovery_is_refused() -> None:
    chain = Chain(ModelSpec.from_dict(TINY))
    output, segment = forward(chain.blocks[1], (torch.randn(1, SEQ, 64),), "inputs", grad=True)
    assert not segment.recovered
    with pytest.raises(RuntimeError, match="layer0: backward without its activations"):
        segment.backward(output)


def test_evaluation_keeps_nothing() -> None:
    chain = Chain(ModelSpec.from_dict(TINY))
    output, segment = forward(chain.blocks[1], (torch.randn(1, SEQ, 64),), "keep", grad=False)
    assert segment is None
    assert not output.requires_grad


def test_rotary_angles_are_exact_in_a_bf16_model() -> None:
    config = TINY | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
    spec = ModelSpec.from_dict(config | {"hidden_size": 128, "max_position_embeddings": 4096})
    positions = build_positions(spec, 4096, torch.bfloat16)
    block = build_block(spec, "layer0", positions, torch.bfloat16).to(torch.bfloat16)
    table = block.positions
    place = torch.arange(4090, 4096, dtype=torch.float64)
    angle = place[:, None] / 10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angle = torch.cat((angle, angle), -1)
    assert table.cos.dtype == torch.bfloat16
    assert (table.cos[0, 4090:].double() - angle.cos()).abs().max() < 0.004
    assert (table.sin[0, 4090:].double() - angle.sin()).abs().max() < 0.004


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.seq_len 129 is beyond the model's 128 positions"):
        build_positions(ModelSpec.from_dict(TINY), 129)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    spec = ModelSpec.from_dict(TINY | {"pad_token_id": 3})
    torch.manual_seed(5)
    first = initial_value(spec, "model.layers.0.mlp.up_proj.weight", (128, 64), seed=7)
    torch.manual_seed(6)
    again = initial_value(spec, "model.layers.0.mlp.up_proj.weight", (128, 64), seed=7)
    assert torch.equal(first, again)
    assert abs(first.std() - 0.02) < 0.001
    assert not torch.equal(first, initial_value(spec, "model.layers.1.mlp.up_proj.weight", (128, 64), seed=7))
    assert not torch.equal(first, initial_value(spec, "model.layers.0.mlp.up_proj.weight", (128, 64), seed=8))
    assert (initial_value(spec, "model.norm.weight", (64,), seed=7) == 1).all()
    assert (initial_value(spec, "model.layers.0.mlp.up_proj.bias", (64,), seed=7) == 0).all()
    embedding = initial_value(spec, "model.embed_tokens.weight", (256, 64), seed=7)
    assert (embedding[3] == 0).all() and (embedding[4] != 0).any()


def test_bind_refuses_wrong_tensors() -> None:
    spec = ModelSpec.from_dict(TINY)
    block = build_block(spec, "head", build_positions(spec, SEQ))
    norm, weight = torch.ones(64), torch.ones(256, 64)
    with pytest.raises(ValueError, match=r"head: missing or superfluous parameters: lm_head.weight"):
        bind(block, {"model.norm.weight": norm})
    with pytest.raises(ValueError, match=r"lm_head.weight is \(255, 64\), expected \(256, 64\)"):
        bind(block, {"model.norm.weight": norm, "lm_head.weight": weight[1:]})


def test_a_head_makes_one_logits_buffer_for_each_micro_batch_in_flight() -> None:
    """Made anew for every micro-batch they leave holes in the heap, which grows by one every few micro-batches."""
    pool = LogitsPool()
    hidden = torch.randn(2, 8, 16, requires_grad=True)
    weight, targets = torch.randn(64, 16, requires_grad=True), torch.randint(0, 64, (2, 8))

    def loss() -> Tensor:
        return head_loss(hidden, weight, targets, 16, pool=pool)

    for _ in range(3):
        first, second = loss(), loss()
        assert pool.idle_bytes == 0
        first.backward()
        second.backward()
        assert pool.idle_bytes == 2 * 16 * 64 * 4
    loss().backward()
    head_loss(hidden, weight, targets, 16, slice_tokens=8, pool=pool).backward()
    with torch.no_grad():
        loss()
    assert pool.idle_bytes == 2 * 16 * 64 * 4 + 8 * 64 * 4
