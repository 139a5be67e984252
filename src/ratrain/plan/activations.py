"""What a block saves and what it needs at work, by whose operators compute.

`torch` operators save what autograd saves (model.activations). The MT-3000 backend's are fused: norms and
the SwiGLU take what they need again from their inputs, so neither fp32 copies nor the SiLU are held, and
cross-entropy turns the logits into their gradient in place, in the view's precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ratrain.model.activations import head_buffers, saved_bytes, working_bytes
from ratrain.model.spec import ModelSpec, Rung
from ratrain.program.layout import HEAD

_FP32 = 4


@dataclass(frozen=True)
class ActivationModel:
    """Activation bytes of one micro-batch of `micro_batch` x `seq_len` tokens."""

    spec: ModelSpec
    operators: str
    micro_batch: int
    seq_len: int
    view_bytes: int
    grad_bytes: int
    slice_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def message(self) -> int:
        """Bytes of what one stage sends another for a micro-batch: [b, S, h] in the view's dtype."""
        return self.tokens * self.spec.hidden * self.view_bytes

    def saved(self, block: str, rung: Rung) -> int:
        """Bytes held from the block's forward to its backward, or to its recovery."""
        return _saved(self, block, rung)

    def working(self, block: str) -> int:
        """Bytes at work beyond `saved` on `keep` and beyond the gradient given."""
        return _working(self, block)

    def buffers(self, in_flight: int) -> int:
        """Bytes that the last stage keeps for logits, besides `saved` and `working`; `in_flight` micro-batches."""
        if self.operators != "torch":
            return 0  # the logits are saved
        return head_buffers(self.spec, self.tokens, self.view_bytes, in_flight, self.slice_tokens)

    @property
    def logits(self) -> int:
        """Bytes of logits and their gradient within the head's `saved` and `working`."""
        rows = min(self.slice_tokens or self.tokens, self.tokens)
        if self.operators != "torch":
            return rows * self.spec.vocab * self.view_bytes
        return rows * self.spec.vocab * (_FP32 if self.view_bytes < _FP32 else 0)


@lru_cache(maxsize=4096)
def _saved(model: ActivationModel, block: str, rung: Rung) -> int:
    spec, tokens, width = model.spec, model.tokens, model.view_bytes
    held = saved_bytes(spec, block, rung, model.micro_batch, model.seq_len, width)
    if model.operators == "torch" or rung != "keep" or block == "embed":
        return held
    if block == HEAD:  # its input, the normalised rows, the targets, and the logits
        return saved_bytes(spec, block, "inputs", model.micro_batch, model.seq_len, width) + (
            tokens * spec.hidden * width + (0 if model.slice_tokens else tokens * spec.vocab * width)
        )
    products = saved_bytes(spec, block, "elementwise", model.micro_batch, model.seq_len, width)
    return products + tokens * (2 * spec.hidden + spec.intermediate) * width  # both norms, SwiGLU's product


@lru_cache(maxsize=4096)
def _working(model: ActivationModel, block: str) -> int:
    if model.operators == "torch":
        return working_bytes(
            model.spec,
            block,
            model.micro_batch,
            model.seq_len,
            model.view_bytes,
            model.grad_bytes,
            slice_tokens=model.slice_tokens,
        )
    same = model.view_bytes  # products are accumulated straight into the gradient
    work = working_bytes(
        model.spec, block, model.micro_batch, model.seq_len, same, same, slice_tokens=model.slice_tokens
    )
    if block != HEAD:
        return work
    rows = min(model.slice_tokens or model.tokens, model.tokens)
    sliced = same if model.slice_tokens else 0
    return work + rows * model.spec.vocab * (sliced - (_FP32 if same < _FP32 else 0))
