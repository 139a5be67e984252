"""Checkpoints that any layout can read, through torch.distributed.checkpoint.

Per parameter name and kind (weight, m, v) there is one logical 1-D tensor of its true, unpadded length; each
rank writes the stretches that its shard holds. Of a parameter that tensor ranks cut, each part is such a tensor of
its own ("weight/NAME@0of2"), read by as many tensor ranks again, or joined by `read_weights`. A manifest says what
the checkpoint is of. A checkpoint is written aside and renamed when complete: a folder with the final name is whole.
"""

from __future__ import annotations

import errno
import math
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.model.tensor_slice import cut_dimension, joined, tensor_slice
from ratrain.program.layout import TIED
from ratrain.runtime.manifest import PARTIAL, Manifest, publish, write_manifest
from ratrain.runtime.mesh import Mesh
from ratrain.runtime.units import StateUnit


class FlatShard(torch.Tensor):
    """A stretch of a logical 1-D tensor, in the form that torch.distributed.checkpoint asks for."""

    total: int
    offset: int

    @staticmethod
    def of(tensor: Tensor, total: int, offset: int) -> FlatShard:
        """`tensor` (1-D, memory shared) as elements `offset`.. of a logical tensor of `total` elements."""
        shard = tensor.detach().as_subclass(FlatShard)
        shard.total, shard.offset = total, offset
        return shard

    def size(self, dim: int | None = None) -> Any:
        """The logical size, which the load planner compares with the stored one."""
        return torch.Size([self.total]) if dim is None else self.total

    def _plain(self) -> Tensor:
        return self.as_subclass(torch.Tensor)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.offset]), torch.Size([self._plain().numel()]))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self._plain()),
            size=torch.Size([self.total]),
        )
        index = MetadataIndex(fqn, torch.Size([self.offset]))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self._plain()


def save(folder: Path, manifest: Manifest, units: Iterable[StateUnit], mesh: Mesh, keep: int) -> Path:
    """Writes ``folder/step-N`` and then removes the oldest, `keep` staying. Called by all ranks together.

    Raises UserError naming the path if there is no space left; nothing partial stays then.
    """
    final = folder / f"step-{manifest.step:08d}"
    partial = final.with_name(final.name + PARTIAL)
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(mesh.world)
    writers = [u for u in units if _writes(u, mesh)]
    names = {
        p.name for u in writers for p in u.parameters if mesh.part == 0 or cut_dimension(p.name) is not None
    }
    try:
        dcp.save(
            _state(writers, mesh, names),
            storage_writer=dcp.FileSystemWriter(partial),
            process_group=mesh.world,
        )
        if mesh.rank == 0:
            write_manifest(partial, manifest)
    except (OSError, dcp.api.CheckpointException) as error:
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if full or "No space left" in str(error):
            raise UserError(
                f"{final}: no space left for a checkpoint; free some or set run.out elsewhere"
            ) from None
        raise
    if mesh.rank == 0:
        publish(partial, final, keep)
    dist.barrier(mesh.world)
    return final


def load(folder: Path, manifest: Manifest, units: Iterable[StateUnit], mesh: Mesh) -> None:
    """Reads a checkpoint of any layout into the units and gathers their views. Called by all ranks."""
    units = list(units)
    try:
        names = {p.name for u in units for p in u.parameters}
        dcp.load(
            _state(units, mesh, names), storage_reader=dcp.FileSystemReader(folder), process_group=mesh.world
        )
    except (OSError, RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        reason = str(error).strip().splitlines()
        raise UserError(
            f"{folder}: checkpoint cannot be read ({reason[-1] if reason else type(error).__name__}); "
            "remove it or name another with --resume"
        ) from None
    for unit in units:
        unit.optimizer.set_updates(manifest.applied)
        unit.publish()
        if unit.keeps_view:
            unit.gather_view()


def read_weights(folder: Path, manifest: Manifest, spec: ModelSpec) -> Callable[[str], Tensor]:
    """A reader of whole weights by parameter name, in the dtype they were saved in; one process, one at a time."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    parts = tensor_slice(spec, manifest.tensor).all_parameters()

    def read(name: str) -> Tensor:
        keys = _keys(name, manifest.tensor)
        return joined([part(f"weight/{key}", parts[name].shape) for key in keys], name, manifest.shapes[name])

    def part(key: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        flat = torch.empty(size, dtype=stored[key].properties.dtype)  # type: ignore[union-attr]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({key: FlatShard.of(flat, size, 0)}, storage_reader=reader, no_dist=True)
        return flat.view(shape)

    return read


def _writes(unit: StateUnit, mesh: Mesh) -> bool:
    """One writer per stretch: of whole copies the first replica's, of a tied matrix the first stage's."""
    whole = unit.zero == 0 and mesh.replica > 0
    second = unit.name == TIED and mesh.stage > 0
    return not (whole or second)


def _keys(name: str, tensor: int) -> list[str]:
    """What a parameter's tensors are called: one, or one a tensor rank where these cut it."""
    if tensor == 1 or cut_dimension(name) is None:
        return [name]
    return [f"{name}@{part}of{tensor}" for part in range(tensor)]


def _state(units: Iterable[StateUnit], mesh: Mesh, names: Collection[str]) -> dict[str, Any]:
    """What this rank holds of the parameters in `names`."""
    state: dict[str, Any] = {}
    for unit in units:
        sizes = {p.name: p.size for p in unit.parameters}
        kinds = zip(("weight", "m", "v"), (unit.master, unit.optimizer.first, unit.optimizer.second))
        for kind, tensor in kinds:
            for piece in unit.pieces():
                if piece.name not in names:
                    continue
                keys = _keys(piece.name, mesh.tensor)
                stretch = tensor[piece.start : piece.start + piece.length]
                state[f"{kind}/{keys[mesh.part % len(keys)]}"] = FlatShard.of(
                    stretch, sizes[piece.name], piece.offset
                )
    return state
