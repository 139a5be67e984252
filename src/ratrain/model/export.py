"""A trained model out: a folder that plain `transformers` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.model.weights import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from torch import Tensor

_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "baichuan": "Baichuan"}
DEFAULT_SHARD_BYTES = 5 * 10**9


def export(
    folder: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    extra_files: Iterable[Path] = (),
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Write `folder` whole or not at all.

    Args:
        tensors: each parameter of the model once, by Hugging Face name, in any order; at most one shard of
            them is held at a time.
        extra_files: copied into the folder (a tokenizer's).
        shard_bytes: size at which a shard is closed.
        replace: whether an existing folder may be replaced.

    Raises:
        UserError: `folder` exists and is not to be replaced, or cannot be written.
        ValueError: a tensor is missing, repeated, foreign or of the wrong shape.
    """
    if folder.exists() and not replace:
        raise UserError(f"{folder}: exists already; choose another folder, or remove it")
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        dtype = _write_tensors(aside, spec, tensors, shard_bytes)
        (aside / "config.json").write_text(json.dumps(exported_config(spec, dtype), indent=2) + "\n")
        for file in extra_files:
            shutil.copyfile(file, aside / file.name)
        _swap_in(aside, folder)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror or error}); nothing was exported"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def exported_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json to write: what was read, plus what a reader might otherwise assume differently."""
    config = dict(spec.raw) | {
        "architectures": [f"{_ARCHITECTURES[spec.family]}ForCausalLM"],
        "model_type": spec.family,
        "torch_dtype": dtype,
    }
    config.pop("dtype", None)
    if spec.family != "baichuan":
        config |= {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    return config


def _write_tensors(
    folder: Path, spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> str:
    """Returns the dtype's name, "float32" for torch.float32."""
    from safetensors.torch import save_file

    missing = spec.all_parameters()
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = held = 0
    dtype = "float32"

    def close_shard() -> None:
        nonlocal held
        shards.append(list(pending))
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        pending.clear()
        held = 0

    for name, tensor in tensors:
        shape = missing.pop(name, None)
        if shape is None:
            raise ValueError(f"{name} is no parameter of the model, or was given twice")
        if tuple(tensor.shape) != shape.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {shape.shape}")
        if pending and held + tensor.nbytes > shard_bytes:
            close_shard()
        # A copy: views of a flat buffer share memory, which safetensors refuses.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
        total += tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
    if missing:
        raise ValueError(f"tensors not given: {', '.join(missing)}")
    close_shard()
    _name_shards(folder, shards, total)
    return dtype


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "shard-1").rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _swap_in(aside: Path, folder: Path) -> None:
    if not folder.exists():
        aside.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old)
