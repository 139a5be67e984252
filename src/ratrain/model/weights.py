"""Hugging Face weights in: safetensors, in one file or in shards with an index.

`check_weights` reads headers only and needs no torch, so that a bad folder is refused before any process
starts; `WeightReader` then reads single tensors, so that a rank touches only its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Buffers that old checkpoints hold and that follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: bytes `[start, end)` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weights (in any format; `check_weights` says if they can be read)."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", INDEX_FILE, "pytorch_model*"))


def check_weights(folder: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """The model's parameters in a folder, by name, all there and all consumed.

    Raises:
        UserError: a missing, truncated or empty file, a tensor that is missing, of the wrong shape or not
            part of the model.
    """
    stored = _stored_tensors(folder)
    expected = spec.all_parameters()
    for name, shape in expected.items():
        if name not in stored:
            raise UserError(f"{folder}: tensor {name} is missing; expected the complete weights of the model")
        tensor = stored[name]
        if tensor.shape != shape.shape:
            raise UserError(
                f"{tensor.file}: tensor {name} is {list(tensor.shape)}; "
                f"config.json makes it {list(shape.shape)}"
            )
        if tensor.dtype not in _DTYPE_BYTES:
            raise UserError(f"{tensor.file}: tensor {name} is {tensor.dtype}; expected F64, F32, F16 or BF16")
    for name in stored.keys() - expected.keys():
        if name.endswith(_DERIVED):
            continue
        if name == "lm_head.weight" and spec.tied:
            _require_equal(stored, name, spec.head_weight)
            continue
        raise UserError(
            f"{stored[name].file}: tensor {name} belongs to no parameter of this {spec.family} model; "
            "expected config.json and weights of one model"
        )
    return {name: stored[name] for name in expected}


class WeightReader:
    """Reads single tensors of a folder that `check_weights` accepted."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._stored = check_weights(folder, spec)

    def read(self, name: str) -> Tensor:
        """The tensor `name` on the CPU, in the dtype it is stored in.

        Raises:
            KeyError: no parameter of the model.
        """
        from safetensors import safe_open

        with safe_open(self._stored[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise UserError(
                f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; expected safetensors "
                "(convert other formats with transformers), or set model.weights to none"
            )
        return _header(single)
    weight_map = _weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in _header(folder / file, named_by=index).items():
            if weight_map.get(name) != file:
                raise UserError(f"{folder / file}: tensor {name} is not listed there by {INDEX_FILE}")
            stored[name] = tensor
    for name, file in weight_map.items():
        if name not in stored:
            raise UserError(f"{folder / file}: tensor {name} is missing, though {INDEX_FILE} lists it there")
    return stored


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            raise ValueError("a file name is not one")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not a safetensors index ({error}); expected a weight_map of tensors"
        ) from None
    result: Mapping[str, str] = weight_map
    return result


def _header(file: Path, named_by: Path | None = None) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file: 8 bytes of header length, a JSON header, the data
    (https://huggingface.co/docs/safetensors, "Format")."""
    try:
        size = file.stat().st_size
    except OSError:
        listed = f", though {named_by.name} lists it" if named_by else ""
        raise UserError(f"{file}: this shard of the weights is missing{listed}; copy it again") from None
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("cut short")
            entries: dict[str, Any] = json.loads(stream.read(length))
        data = 8 + length
        tensors = {
            name: StoredTensor(
                file,
                entry["dtype"],
                tuple(entry["shape"]),
                data + entry["data_offsets"][0],
                data + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: {size} bytes that are no whole safetensors file ({error}); copy it again"
        ) from None
    for name, tensor in tensors.items():
        if tensor.end > size:
            raise UserError(
                f"{file}: cut short at {size} bytes, tensor {name} ends at {tensor.end}; copy it again"
            )
    return tensors


def _require_equal(stored: Mapping[str, StoredTensor], name: str, other: str) -> None:
    """A tied checkpoint may repeat its matrix, but not with other values."""
    left, right = stored[name], stored[other]
    equal = left.end - left.start == right.end - right.start
    with left.file.open("rb") as a, right.file.open("rb") as b:
        a.seek(left.start)
        b.seek(right.start)
        remaining = left.end - left.start
        while equal and remaining:
            step = min(remaining, 1 << 24)
            equal = a.read(step) == b.read(step)
            remaining -= step
    if not equal:
        raise UserError(
            f"{left.file}: {name} differs from {other}, though config.json ties them (tie_word_embeddings); "
            "set it to false, or remove the tensor"
        )
