"""Where gradients accumulate: a parameter's slice of a flat buffer, not `Parameter.grad`.

A parameter with the attribute `main_grad` (a tensor of its shape, in the accumulation precision) gets its
gradient added there. `main_grad_fresh = True` says that the slice holds nothing yet: the next contribution
overwrites it, which saves the pass that would zero it. Operators that own their backward (`linear`,
`embedding`, `head`) write there without a temporary; for all other parameters `attach_main_grad` registers a
hook that moves what autograd computed. `Parameter.grad` stays None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def attach_main_grad(parameter: nn.Parameter, main_grad: Tensor) -> None:
    """Make `main_grad` (same shape, any floating dtype, usually a view into a flat buffer) the place where
    the parameter's gradients accumulate. It starts fresh. May be called again to move the gradient to
    another buffer.

    Raises:
        ValueError: the shapes differ.
    """
    if main_grad.shape != parameter.shape:
        raise ValueError(f"main_grad is {tuple(main_grad.shape)}, its parameter {tuple(parameter.shape)}")
    expect_main_grad(parameter)
    holder: Any = parameter
    holder.main_grad = main_grad
    holder.main_grad_fresh = True


def expect_main_grad(parameter: nn.Parameter) -> None:
    """Say that the parameter's gradients go to a `main_grad`, which is attached before each backward: a
    forward chooses its operators by this and not by whether a buffer exists at that moment."""
    if hasattr(parameter, "main_grad"):
        return
    holder: Any = parameter
    holder.main_grad = None
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_move_gradient)


def has_main_grad(parameter: Tensor) -> bool:
    """Whether gradients of this parameter go to a `main_grad`, be it attached already or not."""
    return hasattr(parameter, "main_grad")


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add `gradient` (the parameter's shape, any floating dtype) to its `main_grad`."""
    main_grad, fresh = _take(parameter)
    if fresh:
        main_grad.copy_(gradient)
    else:
        main_grad.add_(gradient)


def zero_if_fresh(parameter: Tensor) -> None:
    """Contribute a gradient of zero to the parameter's `main_grad`."""
    main_grad, fresh = _take(parameter)
    if fresh:
        main_grad.zero_()


def accumulate_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` (`[rows, k]` and `[k, columns]`) to the `[rows, columns]` `main_grad`; without a
    temporary where the dtypes agree."""
    holder: Any = parameter
    if holder.main_grad.dtype != left.dtype:
        accumulate(parameter, left @ right)
        return
    main_grad, fresh = _take(parameter)
    if fresh:
        torch.mm(left, right, out=main_grad)
    else:
        main_grad.addmm_(left, right)


def accumulate_rows(parameter: Tensor, rows: Tensor, gradient: Tensor) -> None:
    """Add row i of `gradient` (`[n, columns]`) to row `rows[i]` of the `[m, columns]` `main_grad`, in the
    order of i."""
    main_grad, fresh = _take(parameter)
    if fresh:
        main_grad.zero_()
    gradient = gradient.to(main_grad.dtype)
    if main_grad.is_cuda:
        # Sorted, hence repeatable; index_add_ adds atomically there.
        main_grad.index_put_((rows,), gradient, accumulate=True)
    else:
        main_grad.index_add_(0, rows, gradient)


def subtract_scaled_rows(parameter: Tensor, scales: Tensor, matrix: Tensor) -> None:
    """Subtract `scales[i] * matrix[i]` from row i of a `main_grad` that has been contributed to already."""
    holder: Any = parameter
    main_grad: Tensor = holder.main_grad
    main_grad.addcmul_(matrix, scales.unsqueeze(1).to(main_grad.dtype), value=-1)


def _take(parameter: Tensor) -> tuple[Tensor, bool]:
    holder: Any = parameter
    fresh: bool = holder.main_grad_fresh
    holder.main_grad_fresh = False
    return holder.main_grad, fresh


def _move_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        accumulate(parameter, parameter.grad)
        parameter.grad = None
