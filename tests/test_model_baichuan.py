"""Baichuan2 against a Llama model made to compute the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from model_chain import BATCH, SEQ, Chain, assert_close_gradients, batch
from ratrain.model.baichuan import alibi_slopes
from ratrain.model.export import export
from ratrain.model.families import hf_config
from ratrain.model.spec import RUNGS, ModelSpec, load_spec
from ratrain.model.weights import WeightReader

ALIBI: dict[str, Any] = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "model_max_length": 128,
    "pad_token_id": 0,
}
ROTARY = ALIBI | {"max_position_embeddings": 128}
CONFIGS = {"7b": ROTARY, "13b": ALIBI}


def as_llama(spec: ModelSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Llama's parameters as functions of Baichuan2's."""
    result = {}
    for name, value in weights.items():
        if "W_pack" in name:
            for part, rows in zip("qkv", value.split(spec.hidden), strict=True):
                result[name.replace("W_pack", f"{part}_proj")] = rows
        else:
            result[name] = nn.functional.normalize(value) if name == "lm_head.weight" else value
    return result


def reference_logits(spec: ModelSpec, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    model = LlamaForCausalLM(hf_config(spec)).train()
    mask = None
    if spec.positions == "alibi":
        ones = torch.ones(1, SEQ, spec.head_dim)
        model.model.rotary_emb.forward = lambda *args, **kwargs: (ones, torch.zeros_like(ones))
        # The published form: the slope times the key's position, which softmax cannot tell from the distance.
        bias = torch.tensor(alibi_slopes(spec.heads))[:, None, None] * torch.arange(SEQ)
        mask = (bias + torch.full((SEQ, SEQ), -torch.inf).triu(1))[None].expand(BATCH, -1, -1, -1)
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    logits: Tensor = torch.func.functional_call(model, as_llama(spec, weights), (), arguments).logits
    return logits


@pytest.mark.parametrize(
    "options", [{}, {"slice_tokens": 7}, {"own_head": False}], ids=["own", "sliced", "plain"]
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_loss_and_gradients(config: dict[str, Any], options: dict[str, Any]) -> None:
    spec = ModelSpec.from_dict(config)
    chain = Chain(spec, **options)
    ids, targets = batch()
    weights = {name: value.clone().requires_grad_() for name, value in chain.weights.items()}
    logits = reference_logits(spec, weights, ids)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    loss = chain.step([(ids, targets)])
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert_close_gradients(chain.grads, {name: value.grad for name, value in weights.items()}, 1e-5)
    torch.testing.assert_close(chain.logits(ids), logits.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_rung_is_bitwise_the_same(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_dict(config)
    kept = Chain(spec)
    kept.step([batch(0), batch(1)])
    for rung in RUNGS[1:]:
        chain = Chain(spec)
        chain.step([batch(0), batch(1)], rung)
        for name, gradient in kept.grads.items():
            assert torch.equal(chain.grads[name], gradient), (rung, name)


def test_the_length_of_a_head_row_does_not_matter() -> None:
    chain = Chain(ModelSpec.from_dict(ROTARY))
    ids, targets = batch()
    before, loss = chain.logits(ids), chain.step([(ids, targets)])
    chain.weights["lm_head.weight"][17] *= 3
    torch.testing.assert_close(chain.logits(ids), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chain.step([(ids, targets)]), loss, rtol=1e-5, atol=1e-5)


def test_a_bf16_head_with_fp32_gradients_flows_through_the_normalisation() -> None:
    spec = ModelSpec.from_dict(ROTARY)
    chain = Chain(spec, torch.bfloat16, grad_dtype=torch.float32)
    chain.step([batch()])
    gradient, weight = chain.grads["lm_head.weight"], chain.weights["lm_head.weight"].float()
    # Normalisation leaves no gradient along a row.
    along = (gradient * weight).sum(1).norm() / (gradient.norm() * weight.norm(dim=1).mean())
    assert gradient.isfinite().all() and along < 0.02


def test_alibi_slopes_of_40_heads() -> None:
    slopes = alibi_slopes(40)
    assert len(slopes) == 40
    assert slopes[0] == pytest.approx(0.8409, abs=5e-5)
    assert slopes[31] == pytest.approx(2.0**-8)
    assert slopes[32] == pytest.approx(0.9170, abs=5e-5)
    assert alibi_slopes(8) == pytest.approx([2.0**-power for power in range(1, 9)])


def test_the_13b_type_has_no_rotary_table() -> None:
    chain = Chain(ModelSpec.from_dict(ALIBI))
    positions: Any = chain.blocks[1].positions
    assert positions.cos is None and positions.sin is None
    assert positions.masks[0].shape == (1, 4, SEQ, SEQ)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_export_keeps_raw_rows_and_fused_projections(config: dict[str, Any], tmp_path: Path) -> None:
    spec = ModelSpec.from_dict(config)
    chain = Chain(spec)
    chain.weights["lm_head.weight"] *= 5
    export(tmp_path / "export", spec, chain.weights.items())
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert stored["model.layers.0.self_attn.W_pack.weight"].shape == (3 * 64, 64)
    assert torch.equal(stored["lm_head.weight"], chain.weights["lm_head.weight"])
    again = load_spec(tmp_path / "export")
    assert again == spec
    reader = WeightReader(tmp_path / "export", again)
    assert all(torch.equal(reader.read(name), value) for name, value in chain.weights.items())
