"""A model cut into blocks: transformers' own modules on the meta device, bound to the runtime's buffers.

A block is built without memory; `bind` then gives it parameters that are views of a flat buffer. What depends
on token positions only (rotary tables, attention masks) is one `PositionTable`, shared by the layers of a
stage and untouched by any change of the model's dtype.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ratrain.model.embedding import lookup
from ratrain.model.families import decoder_layer, position_table, rms_norm
from ratrain.model.head import LogitsPool, head_loss, plain_head_loss, plain_logits
from ratrain.model.linear import Linear
from ratrain.model.positions import PositionTable
from ratrain.model.spec import ModelSpec, layer_index
from ratrain.model.tensor_parallel import TensorRanks, VocabularyPart, join_layer, spread
from ratrain.model.tensor_slice import tensor_slice


class Block(nn.Module, ABC):
    """A schedulable piece of the model.

    `embed`: `forward(ids)`, int64 `[batch, seq]` to `[batch, seq, hidden]`. `layer<i>`: `forward(x)`,
    `[batch, seq, hidden]` to the same. `head`: `forward(x, targets, denominator)` to a scalar loss.
    Parameters are on the meta device until `bind`.
    """

    def __init__(self, spec: ModelSpec, name: str) -> None:
        super().__init__()
        self.spec = spec
        self.name = name
        self.is_rebuilding = False
        self.ranks: TensorRanks | None = None
        """Who computes the block together, this rank its part; None: it alone."""

    @abstractmethod
    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        """Where each parameter sits: Hugging Face name to (module, attribute)."""

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """While active, a forward is run for its saved activations only; its output may be garbage."""
        self.is_rebuilding = True
        try:
            yield
        finally:
            self.is_rebuilding = False


class EmbedBlock(Block):
    """Token embedding. `part`: of the vocabulary; None has all."""

    def __init__(self, spec: ModelSpec, part: VocabularyPart | None = None) -> None:
        super().__init__(spec, "embed")
        self.part = part
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden))

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        return {"model.embed_tokens.weight": (self, "weight")}

    def forward(self, ids: Tensor) -> Tensor:
        if self.part is not None:
            return self.part.lookup(ids, self.weight, self.spec.pad_token)
        return lookup(ids, self.weight, self.spec.pad_token)


class LayerBlock(Block):
    """One decoder layer. `region` says which part of it is being computed: `attention` (with what leads to
    it), `mlp`, or `output` (its last multiplication, whose value no gradient needs)."""

    def __init__(
        self, spec: ModelSpec, name: str, positions: PositionTable, ranks: TensorRanks | None = None
    ) -> None:
        super().__init__(spec, name)
        self.index = layer_index(name)
        self.layer = decoder_layer(spec, self.index)
        _own_linears(self.layer)
        if ranks is not None:
            join_layer(self.layer, ranks)
        self.positions = positions
        self.region = "attention"
        mlp = self.layer.mlp
        assert isinstance(mlp, nn.Module) and isinstance(mlp.down_proj, Linear)
        self.last: Linear = mlp.down_proj
        mlp.register_forward_pre_hook(lambda *_: self._enter("mlp"))
        mlp.down_proj.register_forward_pre_hook(lambda *_: self._enter("output"))
        mlp.register_forward_hook(lambda *_: self._enter("attention"))

    def _enter(self, region: str) -> None:
        self.region = region

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        return _slots(self.layer, f"model.layers.{self.index}.")

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        self.last.value_needed = False
        try:
            with super().rebuilding():
                yield
        finally:
            self.last.value_needed = True

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, **self.positions.arguments(self.index))
        return output


class HeadBlock(Block):
    """Final norm, LM head and loss. `part`: of the vocabulary; None has all."""

    def __init__(
        self,
        spec: ModelSpec,
        own_backward: bool,
        slice_tokens: int | None,
        part: VocabularyPart | None = None,
    ) -> None:
        super().__init__(spec, "head")
        self.part = part
        self.own_backward = own_backward
        self.slice_tokens = slice_tokens
        self.pool = LogitsPool()
        self.norm = rms_norm(spec)
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden))

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        return {"model.norm.weight": (self.norm, "weight"), self.spec.head_weight: (self, "weight")}

    def logits(self, x: Tensor) -> Tensor:
        """`[batch, seq, hidden]` to `[batch, seq, vocab]`, in the dtype of the weights."""
        return plain_logits(self.norm(x), self.weight, self.spec.head_normalised)

    def forward(self, x: Tensor, targets: Tensor, denominator: int) -> Tensor:
        """Sum of token losses over `targets` (int64 `[batch, seq]`, -100 ignored) divided by `denominator`
        (target tokens of the global batch): fp32, or fp64 in an fp64 model."""
        hidden = self.norm(x) if self.ranks is None else spread(self.norm(x), self.ranks)
        arguments = (hidden, self.weight, targets, denominator, self.spec.head_normalised)
        if self.own_backward:
            return head_loss(*arguments, self.slice_tokens, self.pool, self.part)
        return plain_head_loss(*arguments)


def build_block(
    spec: ModelSpec,
    name: str,
    positions: PositionTable,
    dtype: torch.dtype = torch.float32,
    own_head: bool = True,
    slice_tokens: int | None = None,
    ranks: TensorRanks | None = None,
) -> Block:
    """The block `name` on the meta device, causal, in training mode.

    Args:
        spec: the whole model's.
        positions: the stage's table, see `build_positions`.
        dtype: of the meta parameters; `bind` decides the real one.
        own_head: False leaves the head's backward to autograd (for comparison).
        slice_tokens: see `head.head_loss`.
        ranks: who computes the block together, this rank its part; None: it alone.
    """
    part = None if ranks is None else VocabularyPart.of(ranks, spec.vocab)
    own = spec if ranks is None else tensor_slice(spec, ranks.size)
    if name == "embed":
        block: Block = EmbedBlock(own, part)
    elif name == "head":
        block = HeadBlock(own, own_head, slice_tokens, part)
    else:
        block = LayerBlock(own, name, positions, ranks)
    block.ranks = ranks
    return block.to(dtype)


def build_positions(
    spec: ModelSpec, seq_len: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PositionTable:
    """The stage's rotary (or ALiBi) table and attention masks for sequences of `seq_len` tokens, for layers
    that compute in `dtype`, on `device`.

    Raises:
        UserError: the model has fewer positions than `seq_len`.
    """
    return position_table(spec, seq_len, dtype, torch.device(device))


def bind(
    block: Block, tensors: Mapping[str, Tensor], frozen: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Replace the block's meta parameters by parameters that share memory with `tensors` (by Hugging Face
    name); those in `frozen` get no gradient. A tensor that is a Parameter already is used itself, so that two
    blocks of one stage can share a tied matrix and its gradient. Returns the parameters by name.

    Raises:
        ValueError: a tensor is missing, superfluous, or has another shape.
    """
    slots = block.parameter_slots()
    if slots.keys() != tensors.keys():
        odd = ", ".join(sorted(slots.keys() ^ tensors.keys()))
        raise ValueError(f"{block.name}: missing or superfluous parameters: {odd}")
    bound: dict[str, nn.Parameter] = {}
    for name, (module, attribute) in slots.items():
        expected = getattr(module, attribute).shape
        if tensors[name].shape != expected:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, expected {tuple(expected)}")
        tensor = tensors[name]
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor.detach(), requires_grad=name not in frozen)
        bound[name] = tensor
        setattr(module, attribute, bound[name])
    return bound


def initial_value(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A parameter's initial fp32 values: a function of `seed` and `name` only, whoever asks.

    Hugging Face's rule: matrices normal(0, initializer_range), norms 1, biases 0, the padding row 0.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    value = (
        torch.empty(math.prod(shape)).normal_(0.0, spec.initializer_range, generator=generator).view(shape)
    )
    if name == "model.embed_tokens.weight" and spec.pad_token is not None:
        value[spec.pad_token] = 0
    return value


def _own_linears(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, Linear.like(child))
        else:
            _own_linears(child)


def _slots(module: nn.Module, prefix: str) -> dict[str, tuple[nn.Module, str]]:
    return {
        f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}": (child, attribute)
        for path, child in module.named_modules()
        for attribute, _ in child.named_parameters(recurse=False)
    }
