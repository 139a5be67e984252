"""Hugging Face folders in and out, against transformers' own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM

from ratrain.errors import UserError
from ratrain.model.blocks import bind, build_block, build_positions, initial_value
from ratrain.model.export import export
from ratrain.model.families import hf_config
from ratrain.model.spec import ModelSpec, load_spec
from ratrain.model.weights import WeightReader, check_weights, has_weights

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "sliding_window": 8,
}


def hf_model(config: dict[str, Any]) -> Any:
    spec = ModelSpec.from_dict(config)
    torch.manual_seed(0)
    model = {"qwen2": Qwen2ForCausalLM, "llama": LlamaForCausalLM}[spec.family](hf_config(spec))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    hf_model(CONFIG).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def logits(spec: ModelSpec, reader: WeightReader, ids: Tensor) -> Tensor:
    positions = build_positions(spec, ids.shape[1])
    value = ids
    with torch.no_grad():
        for name in spec.block_names():
            block = build_block(spec, name, positions)
            bind(block, {shape.name: reader.read(shape.name) for shape in spec.parameters(name)})
            value = block.logits(value) if name == "head" else block(value)
    return value


def tensors(spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    # Views of one flat buffer, as the runtime has them.
    flat = torch.cat(
        [initial_value(spec, s.name, s.shape, 1).flatten() for s in spec.all_parameters().values()]
    )
    offset = 0
    for name, shape in spec.all_parameters().items():
        yield name, flat[offset : offset + shape.size].view(shape.shape)
        offset += shape.size


def test_sharded_weights_with_random_biases_give_transformers_logits(sharded: Path) -> None:
    assert has_weights(sharded)
    spec = load_spec(sharded)
    ids = torch.arange(64).view(2, 32)
    expected = AutoModelForCausalLM.from_pretrained(sharded).eval()(input_ids=ids).logits.detach()
    torch.testing.assert_close(logits(spec, WeightReader(sharded, spec), ids), expected, rtol=1e-4, atol=1e-4)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_weights(folder, load_spec(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard = second_shard(copy)
    shard.unlink()
    assert refusal(copy).startswith(f"{shard}: this shard of the weights is missing")


def test_a_tensor_its_shard_lacks_is_named(copy: Path) -> None:
    shard = second_shard(copy)
    held = load_file(shard)
    gone = sorted(held)[0]
    save_file({name: tensor for name, tensor in held.items() if name != gone}, shard)
    assert refusal(copy).startswith(f"{shard}: tensor {gone} is missing, though")


@pytest.mark.parametrize("share", [0.5, 0.01, 0])
def test_a_shard_cut_short_is_named(copy: Path, share: float) -> None:
    shard = second_shard(copy)
    content = shard.read_bytes()
    shard.write_bytes(content[: int(len(content) * share)])
    assert refusal(copy).startswith(f"{shard}: ")


def test_a_tensor_nobody_consumes_is_named(copy: Path) -> None:
    shard = second_shard(copy)
    save_file(load_file(shard) | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, shard)
    assert "model.layers.0.self_attn.o_proj.bias is not listed" in refusal(copy)
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.o_proj.bias"] = shard.name
    index.write_text(json.dumps(content))
    assert "o_proj.bias belongs to no parameter of this qwen2 model" in refusal(copy)


def test_a_wrong_shape_is_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 255}))
    assert "model.embed_tokens.weight is [256, 64]; config.json makes it [255, 64]" in refusal(copy)


def test_a_missing_layer_is_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config.pop("layer_types", None)
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "tensor model.layers.2.input_layernorm.weight is missing" in refusal(copy)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {"a": "../b"}}'])
def test_a_broken_index_is_named(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: not a safetensors index" in refusal(copy)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert has_weights(tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)


def test_a_tied_checkpoint_may_repeat_its_matrix_but_not_change_it(tmp_path: Path) -> None:
    spec = ModelSpec.from_dict(CONFIG | {"tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(json.dumps(spec.raw))
    held = {name: tensor.clone() for name, tensor in tensors(spec)}
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in check_weights(tmp_path, spec)
    held["lm_head.weight"][-1, -1] += 1
    save_file(held, tmp_path / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 32},
        {"architectures": ["LlamaForCausalLM"], "head_dim": 32, "attention_bias": True},
        {"architectures": ["MistralForCausalLM"]},
    ],
)
@pytest.mark.parametrize("shard_bytes", [10**9, 100_000])
def test_an_export_is_loaded_by_transformers(
    change: dict[str, Any], shard_bytes: int, tmp_path: Path
) -> None:
    config = {key: value for key, value in (CONFIG | change).items() if key != "num_key_value_heads"}
    spec = ModelSpec.from_dict(config)
    extra = tmp_path / "tokenizer.json"
    extra.write_text("{}")
    folder = tmp_path / "export"
    export(folder, spec, tensors(spec), [extra], shard_bytes)

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in tensors(spec):
        assert torch.equal(model.state_dict()[name], tensor), name
    ids = torch.arange(64).view(2, 32)
    expected = model.eval()(input_ids=ids).logits.detach()
    again = load_spec(folder)
    assert again == spec
    torch.testing.assert_close(
        logits(again, WeightReader(folder, again), ids), expected, rtol=1e-4, atol=1e-4
    )
    assert (folder / "tokenizer.json").exists()
    index = folder / "model.safetensors.index.json"
    if shard_bytes < 10**9:
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == 4 * spec.parameter_count()
        assert set(content["weight_map"]) == set(spec.all_parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "tokenizer.json"]


def test_an_export_is_whole_or_not_at_all(tmp_path: Path) -> None:
    spec = ModelSpec.from_dict(CONFIG)
    given = list(tensors(spec))
    bad = [
        (given[:-1], "tensors not given: lm_head.weight"),
        ([*given, given[0]], "model.embed_tokens.weight is no parameter of the model, or was given twice"),
        ([(given[0][0], given[0][1][:0]), *given[1:]], r"embed_tokens.weight is \(0, 64\)"),
    ]
    for case, message in bad:
        with pytest.raises(ValueError, match=message):
            export(tmp_path / "export", spec, case)
        assert list(tmp_path.iterdir()) == []
    export(tmp_path / "export", spec, given)
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "export", spec, given)
    export(tmp_path / "export", spec, given, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export(tmp_path / "file" / "export", spec, given)
