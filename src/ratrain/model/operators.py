"""The operators of one forward pass of a block, with their shapes: what a cost model prices. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ratrain.model.spec import ModelSpec, layer_index

Kind = Literal["matmul", "attention", "norm", "elementwise", "lookup", "loss"]


@dataclass(frozen=True)
class Operator:
    """One operator of a forward pass.

    `rows x inner` times `inner x columns` for a matmul; for attention `batch` heads of `rows` queries
    against `rows` keys with `inner` numbers each; otherwise `rows x columns` elements. `flops` counts a
    multiply and an add as two; attention is causal and counts only the pairs that are looked at. `elements`
    is how many tensor elements are read and written if nothing stays in cache. `parameters` are how many of
    them are weights. A matmul's backward is two matmuls of the same size, causal attention's is 2.5 times its
    forward.
    """

    name: str
    kind: Kind
    rows: int
    columns: int
    inner: int = 1
    batch: int = 1
    flops: float = 0.0
    elements: int = 0
    parameters: int = 0


def forward_operators(spec: ModelSpec, block: str, micro_batch: int, seq_len: int) -> tuple[Operator, ...]:
    """Operators of one forward of `block` for `micro_batch` samples of `seq_len` tokens, in order."""
    tokens = micro_batch * seq_len
    if block == "embed":
        size = tokens * spec.hidden
        return (Operator("embed_tokens", "lookup", tokens, spec.hidden, elements=2 * size),)
    if block == "head":
        return tuple(_head(spec, tokens))
    return tuple(_layer(spec, layer_index(block), micro_batch, seq_len))


def _head(spec: ModelSpec, tokens: int) -> Iterator[Operator]:
    yield _norm("norm", tokens, spec.hidden)
    if spec.head_normalised:
        yield _norm("normalise_rows", spec.vocab, spec.hidden)
    yield _matmul("lm_head", tokens, spec.vocab, spec.hidden)
    # Maximum, subtraction, exponential, sum and logarithm: about five operations an element.
    size = tokens * spec.vocab
    yield Operator("cross_entropy", "loss", tokens, spec.vocab, flops=5.0 * size, elements=2 * size)


def _layer(spec: ModelSpec, index: int, micro_batch: int, seq_len: int) -> Iterator[Operator]:
    tokens, hidden, query, kv = micro_batch * seq_len, spec.hidden, spec.query_width, spec.kv_width
    yield _norm("input_layernorm", tokens, hidden)
    if spec.family == "baichuan":
        yield _matmul("W_pack", tokens, query + 2 * kv, hidden)
    else:
        yield _matmul("q_proj", tokens, query, hidden)
        yield _matmul("k_proj", tokens, kv, hidden)
        yield _matmul("v_proj", tokens, kv, hidden)
    if spec.positions == "rotary":
        yield _elementwise("rotary", tokens, query + kv, flops=3, passes=2)
    yield _attention(spec, index, micro_batch, seq_len)
    yield _matmul("o_proj", tokens, hidden, query)
    yield _elementwise("attention_residual", tokens, hidden, flops=1, passes=3)
    yield _norm("post_attention_layernorm", tokens, hidden)
    yield _matmul("gate_proj", tokens, spec.intermediate, hidden)
    yield _matmul("up_proj", tokens, spec.intermediate, hidden)
    yield _elementwise("swiglu", tokens, spec.intermediate, flops=5, passes=3)
    yield _matmul("down_proj", tokens, hidden, spec.intermediate)
    yield _elementwise("mlp_residual", tokens, hidden, flops=1, passes=3)


def _attention(spec: ModelSpec, index: int, micro_batch: int, seq_len: int) -> Operator:
    window = min(spec.windows[index] or seq_len, seq_len)
    # Query i looks at min(i + 1, window) keys; each pair costs 2 * head_dim for the score and as much again
    # for the weighted value.
    pairs = window * (window + 1) // 2 + (seq_len - window) * window
    return Operator(
        "attention",
        "attention",
        seq_len,
        seq_len,
        spec.head_dim,
        micro_batch * spec.heads,
        flops=4.0 * spec.head_dim * pairs * micro_batch * spec.heads,
        elements=micro_batch * seq_len * 2 * (spec.query_width + spec.kv_width),
    )


def _matmul(name: str, rows: int, columns: int, inner: int) -> Operator:
    return Operator(
        name,
        "matmul",
        rows,
        columns,
        inner,
        flops=2.0 * rows * columns * inner,
        elements=rows * inner + columns * inner + rows * columns,
        parameters=columns * inner,
    )


def _norm(name: str, rows: int, columns: int) -> Operator:
    size = rows * columns
    return Operator(name, "norm", rows, columns, flops=4.0 * size, elements=2 * size, parameters=columns)


def _elementwise(name: str, rows: int, columns: int, flops: int, passes: int) -> Operator:
    size = rows * columns
    return Operator(name, "elementwise", rows, columns, flops=float(flops * size), elements=passes * size)
