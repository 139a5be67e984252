"""A run's weights, as plain transformers sees them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ratrain.cli import main
from run_samples import Trained, column


def exported(trained: Trained, folder: Path, *options: str) -> tuple[Any, dict[str, Any]]:
    """The model that transformers loads from an export, and what it says about the loading."""
    from transformers import AutoModelForCausalLM

    assert main(["export", str(trained.run), str(folder), *options]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model.eval(), info


def test_export_means_what_the_run_meant(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No key is missing or left over, and the loss on the validation text is the one that the run logged."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoTokenizer

    from ratrain.data.sampler import EvaluationSampler
    from ratrain.data.store import open_store

    model, info = exported(trained, tmp_path / "hf")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "step-00000008 (step 8)" in capsys.readouterr().out, (
        "a run folder stands for its newest checkpoint"
    )

    setup = json.loads((trained.run / "setup.json").read_text())
    source = EvaluationSampler(open_store(setup["validation"]), 16, 8, 2)
    total, count = 0.0, 0
    for batch in range(source.batches):
        data = source.sequences(batch, range(8))
        targets = torch.from_numpy(data.targets).flatten()
        with torch.no_grad():
            logits = model(torch.from_numpy(data.inputs)).logits.flatten(0, 1)
        total += cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets >= 0).sum())
    assert total / count == pytest.approx(column(trained.run, "eval_loss")[-1], rel=1e-5)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("stage rank micro")["input_ids"]) == "stage rank micro"


def test_sharded_export_of_an_older_checkpoint(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    whole, _ = exported(trained, tmp_path / "whole")
    sharded, info = exported(trained, tmp_path / "sharded", "--shard", "50 KB", "--json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 8
    assert not info["missing_keys"] and not info["unexpected_keys"]
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 2 and {f.name for f in files} == set(index["weight_map"].values())
    assert all(f.stat().st_size < 60_000 for f in files)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in sharded.parameters())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, sharded.state_dict()[name]) and value.numel() > 0

    older = trained.run / "checkpoints" / "step-00000006"
    assert main(["export", str(older), str(tmp_path / "older"), "--dtype", "bf16"]) == 0
    assert "(step 6)" in capsys.readouterr().out
    assert json.loads((tmp_path / "older" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("content", ["home", "file", "nested model"])
def test_export_replaces_an_export_and_nothing_else(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    target = tmp_path / "target"
    if content == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
        if content == "nested model":
            (target / "config.json").write_text("{}")
            (target / "model.safetensors").write_text("")
            (target / "more").mkdir()
    assert main(["export", str(trained.run), str(target)]) == 2
    assert "exists and is no exported model" in capsys.readouterr().err
    assert (target if content == "file" else target / "thesis.txt").read_text() == "mine"


def test_export_over_an_earlier_export(trained: Trained, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["export", str(trained.run), str(tmp_path / "hf")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_what_cannot_be_exported(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(checkpoint: Path, *options: str) -> str:
        assert main(["export", str(checkpoint), str(tmp_path / "out"), *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and not (tmp_path / "out").exists()
        return err

    run = shutil.copytree(trained.run, tmp_path / "run")
    newest = run / "checkpoints" / "step-00000008"
    assert "--shard = 'big': expected a number with a unit" in refused(run, "--shard", "big")
    shutil.copytree(newest, tmp_path / "lonely" / "c" / "step-00000008")
    assert "leave checkpoints inside their run folder" in refused(tmp_path / "lonely" / "c" / "step-00000008")
    model = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(model | {"intermediate_size": 96}))
    assert "model.layers.0.mlp" in refused(run)
    piece = next(newest.glob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[:-1])
    assert f"{piece} has " in refused(run)
    piece.unlink()
    assert f"{piece} is missing" in refused(run)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert "no complete checkpoint in it" in refused(run)
