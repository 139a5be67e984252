"""Shapes, counts and refusals, from config.json alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratrain.errors import UserError
from ratrain.model.activations import head_buffers
from ratrain.model.operators import forward_operators
from ratrain.model.spec import ModelSpec, layer_index, load_spec

EXAMPLES = Path(__file__).parent.parent / "examples" / "models"
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


# Parameter counts from the models' cards and weight indexes (bytes of the 16-bit checkpoints halved).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("qwen2.5-32b", 32_763_876_352),
        ("baichuan2-13b", 13_896_668_160),
    ],
)
def test_published_models_have_their_published_size(name: str, count: int) -> None:
    spec = load_spec(EXAMPLES / name)
    assert spec.parameter_count() == count
    assert len(spec.block_names()) == spec.layers + 2


def test_spec_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from ratrain.model import spec, operators, activations, weights; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocks_and_parameters() -> None:
    spec = ModelSpec.from_dict(TINY)
    assert spec.block_names() == ("embed", "layer0", "layer1", "layer2", "layer3", "head")
    shapes = {shape.name: shape for shape in spec.parameters("layer2")}
    assert shapes["model.layers.2.self_attn.k_proj.weight"].shape == (32, 64)
    assert shapes["model.layers.2.mlp.down_proj.weight"].shape == (64, 128)
    assert {shape.name for shape in shapes.values() if not shape.decay} == {
        "model.layers.2.input_layernorm.weight",
        "model.layers.2.post_attention_layernorm.weight",
    }
    assert [shape.name for shape in spec.parameters("head")] == ["model.norm.weight", "lm_head.weight"]
    tied = ModelSpec.from_dict(TINY | {"tie_word_embeddings": True})
    assert tied.parameters("head")[1] == tied.parameters("embed")[0]
    assert spec.parameter_count() - tied.parameter_count() == 256 * 64


def test_qwen2_has_biases_on_queries_keys_and_values_only() -> None:
    spec = ModelSpec.from_dict(TINY | {"architectures": ["Qwen2ForCausalLM"]})
    biases = [shape for shape in spec.parameters("layer0") if shape.name.endswith("bias")]
    assert [shape.shape for shape in biases] == [(64,), (32,), (32,)]
    assert not any("o_proj" in shape.name or shape.decay for shape in biases)


def test_attention_keys() -> None:
    explicit = ModelSpec.from_dict(TINY | {"head_dim": 32})
    assert explicit.parameters("layer0")[1].shape == (128, 64)
    without = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"):
        assert ModelSpec.from_dict(without | {"architectures": [architecture]}).kv_heads == 4
    qwen2 = TINY | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    assert ModelSpec.from_dict(qwen2).windows == (None,) * 4
    assert ModelSpec.from_dict(qwen2 | {"use_sliding_window": True}).windows == (None, 8, 8, 8)
    mistral = TINY | {"architectures": ["MistralForCausalLM"]}
    assert ModelSpec.from_dict(mistral).windows == (4096,) * 4
    assert ModelSpec.from_dict(mistral | {"sliding_window": None}).windows == (None,) * 4


def test_baichuan2_types_are_told_apart_by_their_positions() -> None:
    alibi = load_spec(EXAMPLES / "baichuan2-13b")
    assert (alibi.positions, alibi.max_positions) == ("alibi", None)
    shapes = {shape.name: shape.shape for shape in alibi.parameters("layer39")}
    assert shapes["model.layers.39.self_attn.W_pack.weight"] == (3 * 5120, 5120)
    assert ModelSpec.from_dict(dict(alibi.raw) | {"max_position_embeddings": 4096}).positions == "rotary"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture (GPT2LMHeadModel); expected one of",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "unsupported architecture"),
        ({"architectures": None}, "unsupported architecture (none named)"),
        ({"num_attention_heads": 7}, "num_attention_heads 7 is not a multiple of"),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7},
            "hidden_size 64 is not a multiple of num_attention_heads 7",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; expected a positive whole number"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"hidden_size": 60}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0"),
        ({"max_position_embeddings": "far"}, "max_position_embeddings is 'far'"),
        ({"pad_token_id": 256}, "pad_token_id is 256"),
        (
            {"rope_scaling": {"type": "wavy", "factor": 2}},
            "rope type is 'wavy'; expected one of default, linear",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number"),
        ({"architectures": ["BaichuanForCausalLM"], "vocab_size": 64000}, "first generation"),
    ],
)
def test_a_bad_configuration_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | change))
    with pytest.raises(UserError) as caught:
        load_spec(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xe6\x00"])
def test_a_file_that_is_no_configuration_is_one_line(content: str | bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load_spec(tmp_path)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_flops_of_llama_2_7b() -> None:
    spec = load_spec(EXAMPLES / "llama-2-7b")
    matmuls = sum(
        operator.flops
        for block in spec.block_names()
        for operator in forward_operators(spec, block, 1, 2048)
        if operator.kind == "matmul"
    )
    # Two operations a token for every weight but the embedding's and the norms'.
    weights = spec.parameter_count() - 32000 * 4096 - 65 * 4096
    assert matmuls == 2 * 2048 * weights
    attention = next(op for op in forward_operators(spec, "layer0", 1, 2048) if op.kind == "attention")
    assert attention.flops == pytest.approx(2 * 2048 * 2048 * 4096, rel=1e-3)
    assert spec.forward_flops("layer0", 2, 2048) == 2 * spec.forward_flops("layer0", 1, 2048)
    assert spec.forward_flops("embed", 1, 2048) == 0


def test_a_window_shortens_attention() -> None:
    mistral = ModelSpec.from_dict(TINY | {"architectures": ["MistralForCausalLM"], "sliding_window": 8})
    pairs = sum(min(query + 1, 8) for query in range(32))
    attention = next(op for op in forward_operators(mistral, "layer0", 1, 32) if op.kind == "attention")
    assert attention.flops == 4 * 16 * 4 * pairs


def test_logits_of_an_fp32_view() -> None:
    spec = load_spec(EXAMPLES / "qwen2.5-32b")
    assert head_buffers(spec, 4096, 4, in_flight=1) / 2**30 == pytest.approx(2.320, abs=5e-4)


def test_layer_index() -> None:
    assert layer_index("layer12") == 12
    for name in ("embed", "head", "layer", "layerx"):
        with pytest.raises(ValueError, match="is no block name"):
            layer_index(name)
