"""What a stage keeps of one block for one micro-batch, and how it gets back what it dropped.

Each block is its own autograd graph: its input is a detached leaf, its output is handed on detached. Life
of a segment: `forward` -> (`recover` ->) `backward` -> gone. On the rung `keep` nothing is recovered. Lower
rungs run the forward without a graph and `recover` reruns it with one: from the stored input alone
(`inputs`), or replaying the stored results of the multiplications and attention (`elementwise`), or of
attention and the projections around it (`mlp`).

Random numbers: before `forward` and before `recover` the caller seeds the default generator alike, whatever
the rung; every rung then draws the same masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from ratrain.model.blocks import Block, EmbedBlock, LayerBlock
from ratrain.model.spec import Rung

_aten = torch.ops.aten
_MULTIPLICATIONS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
_STORED_REGIONS: dict[Rung, frozenset[str]] = {
    "elementwise": frozenset({"attention", "mlp"}),
    "mlp": frozenset({"attention"}),
}


def forward(block: Block, inputs: tuple[Any, ...], rung: Rung, grad: bool) -> tuple[Tensor, Segment | None]:
    """Run a block on one micro-batch.

    Args:
        inputs: the block's arguments; floating-point tensors among them are what gradients are wanted for.
        rung: what to keep. Every rung is `keep` for `embed`; `elementwise` and `mlp` are
            `inputs` for `head`.
        grad: False (evaluation) keeps nothing.

    Returns:
        The output, detached, and the segment (None if not `grad`).
    """
    if not grad:
        with torch.no_grad():
            return block(*inputs), None
    segment = Segment(block, inputs, rung)
    return segment.run(), segment


class Segment:
    """One block's saved activations of one micro-batch. Made by `forward`."""

    def __init__(self, block: Block, inputs: tuple[Any, ...], rung: Rung) -> None:
        self.block = block
        self.inputs = tuple(_leaf(value) for value in inputs)
        # A lookup saves its ids only, which is all there is to drop.
        self.rung: Rung = "keep" if isinstance(block, EmbedBlock) else rung
        self.recovered = False
        """Whether `backward` can run."""
        # The graph of the output without the output, whose values nothing in the backward reads; None if no
        # gradient is wanted (a frozen embedding).
        self._edge: GradientEdge | None = None
        self._unit: Tensor | None = None
        self._replay: AbstractContextManager[Any] | None = None

    def run(self) -> Tensor:
        """The forward. Returns the output, detached."""
        if self.rung == "keep":
            with torch.enable_grad():
                return self._remember(self.block(*self.inputs))
        store: AbstractContextManager[Any] = nullcontext()
        if self.rung in _STORED_REGIONS and isinstance(self.block, LayerBlock):
            results = _StoredResults(self.block, _STORED_REGIONS[self.rung])
            store, self._replay = _Store(results), _Replay(results)
        with torch.no_grad(), store:
            output: Tensor = self.block(*self.inputs)
        return output

    def recover(self) -> None:
        """Rebuild what the rung dropped, from what it kept. Does nothing if nothing is missing."""
        if self.recovered:
            return
        replay, self._replay = self._replay or nullcontext(), None
        with torch.enable_grad(), self.block.rebuilding(), replay:
            self._remember(self.block(*self.inputs))

    def backward(self, grad_output: Tensor | None = None) -> Tensor | None:
        """Accumulate parameter gradients and release everything.

        Args:
            grad_output: gradient of the output; None for the head, whose output is the loss.

        Returns:
            The gradient of the block's input; None for `embed`.

        Raises:
            RuntimeError: not recovered, or already run.
        """
        if not self.recovered:
            raise RuntimeError(f"{self.block.name}: backward without its activations; recover first")
        edge, source = self._edge, self.inputs[0]
        if grad_output is None:
            grad_output = self._unit
        self.release()
        if edge is not None:
            torch.autograd.backward(edge, grad_output)
        if not source.requires_grad:
            return None
        gradient: Tensor | None = source.grad
        source.grad = None
        return gradient

    def _remember(self, output: Tensor) -> Tensor:
        self.recovered = True
        self._edge = get_gradient_edge(output) if output.requires_grad else None
        self._unit = torch.ones_like(output) if output.ndim == 0 else None
        return output.detach()

    def release(self) -> None:
        """Let go of all tensors; called by `backward`, or instead of it."""
        self.inputs = ()
        self.recovered = False
        self._edge = self._unit = self._replay = None


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


class _StoredResults:
    """Results of the multiplications and attention in some regions of a layer, in order of execution.

    Does what `torch.utils.checkpoint.create_selective_checkpoint_contexts` does, except that it permits the
    rerun to leave out a multiplication that nothing needs.
    """

    def __init__(self, block: LayerBlock, regions: Collection[str]) -> None:
        self.block = block
        self.regions = regions
        self.queue: deque[Any] = deque()

    def cover(self, operator: Any) -> bool:
        return operator in _MULTIPLICATIONS and self.block.region in self.regions


class _Store(TorchDispatchMode):
    def __init__(self, results: _StoredResults) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.results.cover(func):
            self.results.queue.append(result)
        return result


class _Replay(TorchDispatchMode):
    def __init__(self, results: _StoredResults) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.results.cover(func):
            return self.results.queue.popleft()
        return func(*args, **(kwargs or {}))
