"""A linear layer that owns its backward: the weight gradient goes straight into `main_grad`."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from ratrain.model.main_grad import accumulate, accumulate_product, has_main_grad


class Linear(nn.Linear):
    """`nn.Linear` with the same values. Autograd would write the weight gradient to a temporary and add that
    to the accumulated one; here one `addmm_` does both."""

    value_needed: bool = True
    """False while a block is rebuilt for its saved activations only and nothing reads this layer's output:
    the multiplication is skipped and the output is uninitialised."""

    @classmethod
    def like(cls, linear: nn.Linear) -> Self:
        """A layer that takes over the parameters of `linear`."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return self.multiply(input, self.bias)

    def multiply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """`forward` with this bias instead of the layer's own."""
        if not self.value_needed or (torch.is_grad_enabled() and has_main_grad(self.weight)):
            result: Tensor = _Linear.apply(input, self.weight, bias, self.value_needed)
            return result
        return nn.functional.linear(input, self.weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, value_needed: bool) -> Tensor:
        ctx.save_for_backward(input)
        # As objects: a saved tensor may come back without the attributes that main_grad needs.
        ctx.weight, ctx.bias = weight, bias
        if value_needed:
            return nn.functional.linear(input, weight, bias)
        return input.new_empty(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grads
        (input,), weight = ctx.saved_tensors, ctx.weight
        grad_rows = grad_output.reshape(-1, weight.shape[0])
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = (grad_rows @ weight).view(input.shape)
        if ctx.needs_input_grad[1]:
            rows = input.reshape(-1, weight.shape[1])
            if has_main_grad(weight):
                accumulate_product(weight, grad_rows.t(), rows)
            else:
                grad_weight = grad_rows.t() @ rows
        if ctx.needs_input_grad[2]:
            summed = grad_rows.sum(0)
            if has_main_grad(ctx.bias):
                accumulate(ctx.bias, summed)
            else:
                grad_bias = summed
        return grad_input, grad_weight, grad_bias, None
