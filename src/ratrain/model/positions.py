"""What a decoder layer needs to know of token positions: the same for all micro-batches of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratrain.model.spec import ModelSpec


@dataclass(frozen=True)
class PositionTable:
    """Tables for sequences of a fixed length, on the device of the run. Neither parameters nor a module's
    buffers, so that nothing casts them: angles are fp32, only their sines and cosines are rounded."""

    cos: Tensor | None
    """`[1, seq, head_dim]`; None without rotary positions."""
    sin: Tensor | None
    masks: tuple[Tensor | None, ...]
    """Of each layer: added to the scores, `[1, 1 or heads, seq, seq]`, in the dtype of the run (attention
    would convert a boolean mask and keep the copy, for every micro-batch); None is plainly causal."""

    def arguments(self, layer: int) -> dict[str, Any]:
        """Keyword arguments for a decoder layer's forward."""
        rotary = None if self.cos is None else (self.cos, self.sin)
        return {"position_embeddings": rotary, "attention_mask": self.masks[layer]}


def window_masks(
    spec: ModelSpec, seq_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, ...]:
    """Masks of layers whose sliding window is shorter than the sequence; equal windows share one."""
    made: dict[int, Tensor] = {}
    position = torch.arange(seq_len, device=device)
    distance = position[:, None] - position[None, :]
    for window in spec.windows:
        if window is not None and window < seq_len and window not in made:
            seen = (distance >= 0) & (distance < window)
            made[window] = torch.zeros_like(distance, dtype=dtype).masked_fill(~seen, -torch.inf)[None, None]
    return tuple(None if window is None else made.get(window) for window in spec.windows)
