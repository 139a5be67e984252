"""A whole model in one process, made of blocks: what the runtime does, without it."""

from typing import Any

import torch
from torch import Tensor, nn

from ratrain.model.blocks import Block, bind, build_block, build_positions, initial_value
from ratrain.model.main_grad import attach_main_grad
from ratrain.model.segment import forward
from ratrain.model.spec import ModelSpec

SEQ = 32
BATCH = 2


class Chain:
    """All blocks of a model, gradients in `main_grad`."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        frozen: tuple[str, ...] = (),
        main_grads: bool = True,
        grad_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.spec = spec
        positions = build_positions(spec, SEQ, dtype)
        self.weights = {
            name: initial_value(spec, name, shape.shape, seed=1).to(dtype)
            for name, shape in spec.all_parameters().items()
        }
        for name, value in self.weights.items():  # so that biases and norms matter
            if value.ndim == 1:
                value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
        self.blocks: list[Block] = [
            build_block(spec, name, positions, dtype, **options) for name in spec.block_names()
        ]
        # Garbage first: a fresh gradient must be overwritten, not added to.
        self.grads = {
            name: torch.full_like(value, torch.nan, dtype=grad_dtype) for name, value in self.weights.items()
        }
        self.parameters: dict[str, nn.Parameter] = {}
        for block in self.blocks:
            names = [shape.name for shape in spec.parameters(block.name)]
            for name, parameter in bind(block, {name: self.weights[name] for name in names}, frozen).items():
                self.parameters[name] = parameter
                if name == "model.embed_tokens.weight" and block.name == "head":
                    self.grads["head copy"] = torch.full_like(parameter, torch.nan)
                    attach_main_grad(parameter, self.grads["head copy"])
                elif main_grads and parameter.requires_grad:
                    attach_main_grad(parameter, self.grads[name])

    def logits(self, ids: Tensor) -> Tensor:
        value = ids
        with torch.no_grad():
            for block in self.blocks[:-1]:
                value = block(value)
            logits: Tensor = self.blocks[-1].logits(value)
        return logits

    def step(self, micro_batches: list[tuple[Tensor, Tensor]], rung: str = "keep") -> Tensor:
        """Loss of a step; gradients are left in `grads`."""
        denominator = sum(int((targets != -100).sum()) for _, targets in micro_batches)
        total = torch.zeros(())
        for ids, targets in micro_batches:
            value, segments = ids, []
            for number, block in enumerate(self.blocks):
                inputs = (value, targets, denominator) if block.name == "head" else (value,)
                torch.manual_seed(number)
                value, segment = forward(block, inputs, rung, grad=True)
                segments.append(segment)
            total = total + value
            gradient = None
            for number, segment in reversed(list(enumerate(segments))):
                torch.manual_seed(number)
                segment.recover()
                gradient = segment.backward(gradient)
        if "head copy" in self.grads:
            self.grads["model.embed_tokens.weight"] += self.grads.pop("head copy")
        return total


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (BATCH, SEQ), generator=generator)
    targets = torch.randint(0, 256, (BATCH, SEQ), generator=generator)
    targets[0, :5] = -100
    return ids, targets


def assert_close_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """`|difference| / max(|gradient|, 1e-3 * global norm)` within `bound`, per tensor."""
    assert found.keys() == expected.keys()
    norm = torch.sqrt(sum(g.pow(2).sum() for g in expected.values()))
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / max(gradient.norm(), 1e-3 * norm)
        assert error < bound, f"{name}: {error}"
