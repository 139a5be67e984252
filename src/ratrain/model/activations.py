"""Activation memory of blocks, from shapes alone: what a micro-batch holds between forward and backward on
each rung, and what a backward needs on top. No torch.

The formulas list what autograd saves in the modules of `blocks` on a CPU; tests hold them against the real
thing.
"""

from __future__ import annotations

from ratrain.model.spec import ModelSpec, Rung, layer_index

_FP32 = 4
_INT64 = 8


def saved_bytes(
    spec: ModelSpec,
    block: str,
    rung: Rung,
    micro_batch: int,
    seq_len: int,
    view_bytes: int,
) -> int:
    """Bytes that one micro-batch of a block holds from its forward to its backward, its input included and
    its output not (that is the next block's input), nor the logits (`head_buffers`).

    Args:
        micro_batch: samples.
        view_bytes: of one number in the compute precision.
    """
    tokens = micro_batch * seq_len
    if block == "embed":
        return tokens * _INT64
    if block == "head":
        return _head(spec, rung, tokens, view_bytes)
    return _layer(spec, layer_index(block), rung, micro_batch, seq_len, view_bytes)


def working_bytes(
    spec: ModelSpec,
    block: str,
    micro_batch: int,
    seq_len: int,
    view_bytes: int,
    grad_bytes: int,
    slice_tokens: int = 0,
) -> int:
    """Bytes that the forward or backward of a block needs for a moment beyond what `keep` saves and beyond
    the gradient it is given; what it hands on (output or gradient) is included.

    A forward or recovery on a lower rung needs no more than `keep` saves plus this.

    Args:
        grad_bytes: of one number in the accumulation precision; where it is not the compute precision, the
            largest weight gradient exists once more before it is added.
        slice_tokens: tokens a slice of the head, 0 for an unsliced head.
    """
    tokens = micro_batch * seq_len
    converted = grad_bytes != view_bytes
    if block == "embed":
        return tokens * spec.hidden * max(view_bytes, grad_bytes if converted else 0)
    largest = max(shape.size for shape in spec.parameters(block)) * view_bytes if converted else 0
    if block == "head":
        rows = min(slice_tokens, tokens) if slice_tokens else tokens
        # Normalised rows need logits and gradient side by side; a loss in fp32 needs a copy of 16-bit logits.
        copies = (view_bytes if spec.head_normalised else 0) + (_FP32 if view_bytes < _FP32 else 0)
        product = tokens * spec.hidden * view_bytes + max(rows * spec.vocab * copies, largest)
        # The norm's backward comes when only the logits' buffers are left: three tensors of its input's shape.
        return max(product, 3 * tokens * spec.hidden * max(view_bytes, _FP32))
    # While the gradient of the SwiGLU product is taken apart its two factors' gradients exist beside it, and
    # the product itself is gone.
    inside = max(2 * spec.intermediate, spec.hidden + spec.query_width + 2 * spec.kv_width)
    # Attention off the flash path takes one more fp32 map of scores than is freed by then.
    scores = spec.heads * tokens * seq_len * _FP32 if spec.dropout and view_bytes < _FP32 else 0
    return tokens * inside * view_bytes + scores + largest


def head_buffers(spec: ModelSpec, tokens: int, view_bytes: int, in_flight: int, slice_tokens: int = 0) -> int:
    """Bytes of the logits' buffers, which the head makes once and uses again: one for each micro-batch of `tokens`
    that is between forward and backward, or one of a slice."""
    if slice_tokens:
        return min(slice_tokens, tokens) * spec.vocab * view_bytes
    return in_flight * tokens * spec.vocab * view_bytes


def table_bytes(spec: ModelSpec, seq_len: int, view_bytes: int) -> int:
    """Bytes of the position table that all layers of a rank share: rotary sines and cosines, and the masks of
    ALiBi and of sliding windows shorter than the sequence."""
    if spec.positions == "alibi":
        return spec.heads * seq_len * seq_len * view_bytes
    masks = {window for window in spec.windows if window is not None and window < seq_len}
    return (2 * seq_len * spec.head_dim + len(masks) * seq_len * seq_len) * view_bytes


def _head(spec: ModelSpec, rung: Rung, tokens: int, view_bytes: int) -> int:
    held = tokens * (spec.hidden * view_bytes + _INT64)
    if rung != "keep":
        return held
    if spec.head_normalised:
        held += spec.vocab * max(_FP32, view_bytes)
    return held + _norm(tokens, spec.hidden, view_bytes, input_held=True)


def _layer(spec: ModelSpec, index: int, rung: Rung, micro_batch: int, seq_len: int, view_bytes: int) -> int:
    tokens, hidden, query, kv = micro_batch * seq_len, spec.hidden, spec.query_width, spec.kv_width
    held = tokens * hidden * view_bytes
    if rung == "inputs":
        return held
    statistics = spec.heads * tokens * max(_FP32, view_bytes)
    if rung in ("elementwise", "mlp"):
        # Results of the projections and of attention.
        held += tokens * (query + 2 * kv + hidden) * view_bytes
        if not spec.dropout:
            held += tokens * query * view_bytes + statistics
        if rung == "elementwise":
            held += tokens * 2 * spec.intermediate * view_bytes
        return held
    norms = _norm(tokens, hidden, view_bytes, True) + _norm(tokens, hidden, view_bytes, False)
    # Gate, its SiLU, up, and their product.
    mlp = tokens * 4 * spec.intermediate * view_bytes
    return held + norms + _attention(spec, index, micro_batch, seq_len, view_bytes) + mlp


def _norm(tokens: int, width: int, view_bytes: int, input_held: bool) -> int:
    """Input in fp32 (Hugging Face's norms compute in fp32; in an fp32 model that is the input itself), its
    inverse root mean square, and the result before and after the scale."""
    input_copy = 0 if view_bytes == _FP32 and input_held else tokens * width * _FP32
    return input_copy + tokens * _FP32 + 2 * tokens * width * view_bytes


def _attention(spec: ModelSpec, index: int, micro_batch: int, seq_len: int, view_bytes: int) -> int:
    tokens, query = micro_batch * seq_len, spec.query_width
    wide = max(_FP32, view_bytes)
    if spec.dropout:
        # Dropout takes the CPU off the flash path: scaled queries, keys and values of all heads, and three
        # maps of scores (softmax, mask, their product), in fp32.
        maps = 3 * spec.heads * tokens * seq_len * wide
        return tokens * query * view_bytes + 3 * tokens * query * wide + maps
    window = spec.windows[index]
    # A mask makes transformers copy keys and values for every query head.
    kv = query if window is not None and window < seq_len else spec.kv_width
    return tokens * (2 * query + 2 * kv) * view_bytes + spec.heads * tokens * wide
