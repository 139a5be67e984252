"""The reference under a test's configuration, and other things that need one plain process."""

from __future__ import annotations

from typing import Any

from runtime_jobs import global_batch, samplers, schedule_of, spec_of


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and evaluation-free weights of `config`'s training, all of a global batch in one pass;
    `gradients` are those of step 1 before clipping, flat numpy arrays by name."""
    from ratrain.runtime.build import DTYPES
    from ratrain.runtime.plain import PlainTraining
    from ratrain.runtime.shard_optimizer import AdamW

    training = PlainTraining(
        spec_of(config), DTYPES[config["view"]], config["seed"], AdamW(0.1, 0.9, 0.95, 1e-8)
    )
    named = training.parameters
    schedule, (sampler, _) = schedule_of(config), samplers(config)
    told: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for step in range(config["steps"]):
        told["losses"].append(training.backward(sampler.sequences(step, range(global_batch(config)))))
        if step == 0:
            told["gradients"] = {n: p.grad.flatten().clone().numpy() for n, p in named.items()}
        told["norms"].append(training.update(schedule(step), config["clip"]))
    told["weights"] = {n: p.detach().flatten().numpy() for n, p in named.items()}
    return told


def export_logits(arguments: dict[str, Any]) -> dict[str, Any]:
    """Exports a checkpoint and loads it with transformers. arguments: checkpoint, folder, config.

    Returns the logits of fixed ids (numpy), what transformers missed or did not expect, and the shapes."""
    import json
    from pathlib import Path

    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from ratrain.model.export import export
    from ratrain.runtime.checkpoint import read_weights
    from ratrain.runtime.manifest import read_manifest

    spec, folder, checkpoint = (
        spec_of(arguments["config"]),
        Path(arguments["folder"]),
        arguments["checkpoint"],
    )
    manifest = read_manifest(Path(checkpoint))
    read = read_weights(Path(checkpoint), manifest, spec)
    export(folder, spec, ((name, read(name)) for name in manifest.shapes), shard_bytes=4000)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    ids = torch.arange(2 * 12).view(2, 12) % spec.vocab
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return {
        "logits": logits.numpy(),
        "faults": {kind: sorted(map(str, found)) for kind, found in info.items() if found},
        "shapes": shapes,
        "expected": {name: tuple(p.shape) for name, p in spec.all_parameters().items()},
        "index": json.loads((folder / "model.safetensors.index.json").read_text()),
    }


def stored(arguments: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """Which stretches (offset, length) of which logical tensors a checkpoint's files hold."""
    from torch.distributed.checkpoint import FileSystemReader

    found: dict[str, list[tuple[int, int]]] = {}
    for index in FileSystemReader(arguments["checkpoint"]).read_metadata().storage_data:
        found.setdefault(index.fqn, []).append(index.offset[0])
    sizes = FileSystemReader(arguments["checkpoint"]).read_metadata().state_dict_metadata
    return {
        name: sorted((c.offsets[0], c.sizes[0]) for c in sizes[name].chunks if c.offsets[0] in offsets)
        for name, offsets in found.items()
    }


def rotary_error(arguments: dict[str, Any]) -> dict[str, float]:
    """Errors of cos and sin at positions 4090 to 4095 in a bf16 stage against float64, before and after
    training with recovery, a checkpoint and its loading."""
    import torch

    import runtime_jobs

    seen: list[float] = []

    class Watch(runtime_jobs.Watch):
        def attach(self, trainer: Any) -> None:
            super().attach(trainer)
            seen.append(_rotary_error(trainer))

        def told(self, trainer: Any) -> dict[str, Any]:
            seen.append(_rotary_error(trainer))
            return {}

    def _rotary_error(trainer: Any) -> float:
        table = trainer.stage.blocks["layer0"].positions
        place = torch.arange(4090, 4096, dtype=torch.float64)
        angle = place[:, None] / 10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
        angle = torch.cat((angle, angle), -1)
        errors = [(table.cos[0, 4090:].double() - angle.cos()), (table.sin[0, 4090:].double() - angle.sin())]
        return float(torch.stack(errors).abs().max())

    model = {"hidden_size": 128, "num_attention_heads": 1, "head_dim": 128, "max_position_embeddings": 4096}
    config = runtime_jobs.DEFAULTS | {
        "model": model,
        "layers": (1,),
        "microbatches": 1,
        "micro_batch": 1,
        "seq_len": 4096,
        "tokens": 9000,
        "view": "bf16",
        "rungs": "inputs",
        "elide": False,
        "steps": 1,
        "folder": arguments["folder"],
    }
    runtime_jobs.train(config, Watch)
    resumed = {"steps": 2, "resume": f"{arguments['folder']}/step-00000001"}
    runtime_jobs.train(config | resumed, Watch)
    return {"before": seen[0], "after": max(seen[1:])}


def state(arguments: dict[str, Any]) -> dict[str, bytes]:
    """Every logical tensor of a checkpoint as bytes."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(arguments["checkpoint"])
    sizes = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(s.size, dtype=s.properties.dtype) for name, s in sizes.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
