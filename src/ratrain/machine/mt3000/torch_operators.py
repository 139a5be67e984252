"""Torch operators that compute on the emulated chip: every operator of a Llama layer as an autograd Function.

`Mt3000` holds the chip and the account of what its operators would take on it. Operands are FP16 (row statistics
and optimizer state FP32); results come from the tile executor, tile by tile. `install` swaps the operators of a
Hugging Face decoder layer for these, leaving its modules, parameters and hooks where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ratrain.errors import UserError
from ratrain.machine.mt3000 import layer
from ratrain.machine.mt3000.attention import Heads, best_attention
from ratrain.machine.mt3000.chip import Chip, load_chip
from ratrain.machine.mt3000.executor import execute
from ratrain.machine.mt3000.gemm import Problem
from ratrain.machine.mt3000.gemm_search import best_gemm
from ratrain.machine.mt3000.schedule import Schedule

TakeGradient = Callable[[Tensor, Tensor], bool]


@dataclass
class Account:
    """What the operators run so far would take on the chip: seconds (launches included), bytes per path, and
    seconds per operator."""

    seconds: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    operators: dict[str, float] = field(default_factory=dict)

    def add(self, operator: str, seconds: float, moved: dict[str, int]) -> None:
        self.seconds += seconds
        self.operators[operator] = self.operators.get(operator, 0.0) + seconds
        for path, size in moved.items():
            self.bytes[path] = self.bytes.get(path, 0) + size

    def reset(self) -> None:
        self.seconds = 0.0
        self.bytes.clear()
        self.operators.clear()


class Mt3000:
    """One emulated compute cluster.

    `take_gradient(parameter, gradient)`: offered every weight gradient; True means it was accumulated elsewhere
    and autograd gets none.
    """

    def __init__(self, chip: Chip | None = None, take_gradient: TakeGradient | None = None) -> None:
        self.chip = chip or load_chip()
        self.account = Account()
        self.take_gradient = take_gradient

    def run(
        self,
        operator: str,
        schedule: Schedule,
        tensors: dict[str, Tensor],
        values: dict[str, float] | None = None,
    ) -> None:
        """Execute `schedule` on the memory of `tensors` and book it. Tensors must be contiguous, on the CPU."""
        arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
        counters = execute(schedule, self.chip, arrays, values)
        seconds = counters.cycles / self.chip.clock_hz + self.chip.launch_seconds
        self.account.add(operator, seconds, counters.bytes)

    def gemm(self, a: Tensor, b: Tensor, trans: str, operator: str = "gemm") -> Tensor:
        """a [m,k] b [k,n], with b [n,k] for trans nt and a [k,m] for tn; FP16 in and out, FP32 sums."""
        m, k = a.shape if trans != "tn" else a.shape[::-1]
        n = b.shape[0] if trans == "nt" else b.shape[1]
        c = a.new_empty(m, n)
        cost = best_gemm(self.chip, Problem(m, n, k, "fp16", trans))
        self.run(operator, cost.schedule, {"A": a.contiguous(), "B": b.contiguous(), "C": c})
        return c

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, value_needed: bool = True
    ) -> Tensor:
        """x [..., inputs] to [..., outputs]; weight [outputs, inputs]. Without `value_needed` the product is
        skipped and the result is uninitialised (a recovery that needs saved activations only)."""
        return _call(_Linear, self, x, weight, bias, value_needed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _call(_RmsNorm, self, x, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [tokens, heads, d] rotated by cos, sin [tokens, d/2]."""
        return _call(_Rotary, self, x, cos, sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal; q [batch, queries, heads, d], k and v [batch, keys, kv_heads, d]; the result like q."""
        return _call(_Attention, self, q, k, v)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return _call(_SwiGlu, self, gate, up)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return _call(_Add, self, a, b)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight [vocabulary, width] by ids of any shape."""
        return _call(_Embedding, self, ids, weight)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """FP32 loss of every row; logits [rows, vocabulary], int64 targets, negative where none counts."""
        return _call(_CrossEntropy, self, logits, targets)

    def head_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, denominator: int) -> Tensor:
        """Sum of token losses over `denominator`, from hidden [..., width] after the final norm."""
        logits = self.linear(hidden.reshape(-1, hidden.shape[-1]), weight)
        return self.cross_entropy(logits, targets.reshape(-1)).sum() / denominator

    def adamw_(
        self,
        p: Tensor,
        m: Tensor,
        v: Tensor,
        gradient: Tensor,
        view: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float = 1.0,
    ) -> None:
        """Update FP32 p, m, v in place from `gradient` (FP16 or FP32, times grad_scale); write the FP16 `view`.
        `step` counts from 1. All flat and of one length."""
        values = {
            "lr": lr,
            "beta1": betas[0],
            "beta2": betas[1],
            "eps": eps,
            "weight_decay": weight_decay,
            "bias1": 1 - betas[0] ** step,
            "bias2": 1 - betas[1] ** step,
            "grad_scale": grad_scale,
        }
        kind = "fp16" if gradient.dtype == torch.float16 else "fp32"
        schedule = layer.adamw(self.chip, p.numel(), kind)
        self.run("adamw", schedule, {"p": p, "m": m, "v": v, "g": gradient, "view": view}, values)

    def weight_gradient(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        if self.take_gradient is not None and self.take_gradient(parameter, gradient):
            return None
        return gradient


def install(decoder_layer: nn.Module, chip: Mt3000) -> None:
    """Make a Hugging Face Llama-like decoder layer compute on `chip`. UserError for other layers."""
    attention, mlp = getattr(decoder_layer, "self_attn", None), getattr(decoder_layer, "mlp", None)
    parts = [
        (attention, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (mlp, ("gate_proj", "up_proj", "down_proj")),
    ]
    parts.append((decoder_layer, ("input_layernorm", "post_attention_layernorm")))
    if (
        attention is None
        or mlp is None
        or not all(hasattr(module, name) for module, names in parts for name in names)
    ):
        raise UserError(
            f"{type(decoder_layer).__name__}: backend mt3000 runs Llama-like layers (q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj, down_proj, two RMS norms); use backend torch for this model"
        )
    for module in decoder_layer.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear_forward, module, chip)  # type: ignore[method-assign]
    for name in ("input_layernorm", "post_attention_layernorm"):
        install_norm(getattr(decoder_layer, name), chip)
    mlp.forward = partial(_mlp_forward, mlp, chip)
    attention.forward = partial(_attention_forward, attention, chip)
    decoder_layer.forward = partial(_layer_forward, decoder_layer, chip)


def install_norm(norm: nn.Module, chip: Mt3000) -> None:
    """Make a Hugging Face RMS norm compute on `chip`."""
    norm.forward = partial(_norm_forward, norm, chip)


def _linear_forward(module: nn.Linear, chip: Mt3000, x: Tensor) -> Tensor:
    return chip.linear(x, module.weight, module.bias, getattr(module, "value_needed", True))


def _norm_forward(module: Any, chip: Mt3000, x: Tensor) -> Tensor:
    return chip.rms_norm(x, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, chip: Mt3000, x: Tensor) -> Tensor:
    result: Tensor = module.down_proj(chip.swiglu(module.gate_proj(x), module.up_proj(x)))
    return result


def _attention_forward(
    module: Any, chip: Mt3000, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    batch, seq, _width = hidden_states.shape
    q, k, v = (
        project(hidden_states).view(batch, seq, -1, module.head_dim)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    cos, sin = (
        table[..., : module.head_dim // 2]
        .float()
        .expand(batch, seq, -1)
        .reshape(batch * seq, -1)
        .contiguous()
        for table in position_embeddings
    )
    q, k = (chip.rotary(x.flatten(0, 1), cos, sin).view(x.shape) for x in (q, k))
    mixed = chip.attention(q, k, v)
    return module.o_proj(mixed.flatten(2)), None


def _layer_forward(module: Any, chip: Mt3000, hidden_states: Tensor, **arguments: Any) -> Tensor:
    mixed, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **arguments)
    hidden_states = chip.add(hidden_states, mixed)
    return chip.add(hidden_states, module.mlp(module.post_attention_layernorm(hidden_states)))


def _call(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _array(name: str, tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: expected a contiguous CPU tensor, got {tensor.stride()} on {tensor.device}"
        )
    array: np.ndarray = tensor.numpy()
    return array


def _half(tensor: Tensor, what: str) -> Tensor:
    if tensor.dtype != torch.float16:
        raise UserError(
            f"{what} is {tensor.dtype}; backend mt3000 computes in FP16, set precision.view to fp16"
        )
    return tensor.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chip: Mt3000, x: Tensor, weight: Tensor, bias: Tensor | None, value_needed: bool
    ) -> Tensor:
        rows = _half(x, "a linear layer's input").reshape(-1, x.shape[-1])
        ctx.chip, ctx.weight, ctx.bias = chip, weight, bias
        ctx.save_for_backward(rows)
        shape = (*x.shape[:-1], weight.shape[0])
        if not value_needed:
            return x.new_empty(shape)
        y = chip.gemm(rows, _half(weight, "a weight"), "nt", "linear")
        if bias is not None:
            tensors = {"X": y, "W": _half(bias, "a bias"), "Y": torch.empty_like(y)}
            chip.run("bias", layer.bias_forward(chip.chip, *y.shape), tensors)
            y = tensors["Y"]
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chip, weight, (rows,) = ctx.chip, ctx.weight, ctx.saved_tensors
        upstream = grads[0].reshape(-1, weight.shape[0]).contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_x = chip.gemm(upstream, weight, "nn", "linear input gradient")
            grad_x = grad_x.view(*grads[0].shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[2]:
            grad_weight = chip.weight_gradient(
                weight, chip.gemm(upstream, rows, "tn", "linear weight gradient")
            )
        if ctx.bias is not None and ctx.needs_input_grad[3]:
            total = torch.empty_like(ctx.bias)
            chip.run(
                "bias gradient",
                layer.bias_backward(chip.chip, *upstream.shape),
                {"dY": upstream, "dW": total},
            )
            grad_bias = chip.weight_gradient(ctx.bias, total)
        return None, grad_x, grad_weight, grad_bias, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _half(x, "a norm's input").reshape(-1, x.shape[-1])
        y, rstd = torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)
        tensors = {"X": rows, "W": _half(weight, "a norm's weight"), "Y": y, "rstd": rstd}
        chip.run("rms norm", layer.rmsnorm_forward(chip.chip, *rows.shape), tensors, {"eps": eps})
        ctx.chip, ctx.weight = chip, weight
        ctx.save_for_backward(rows, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chip, (rows, rstd) = ctx.chip, ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(rows), torch.empty_like(ctx.weight)
        tensors = {
            "X": rows,
            "W": ctx.weight.contiguous(),
            "rstd": rstd,
            "dY": grads[0].reshape(rows.shape).contiguous(),
        }
        tensors |= {"dX": grad_x, "dW": grad_weight}
        chip.run("rms norm gradient", layer.rmsnorm_backward(chip.chip, *rows.shape), tensors)
        return None, grad_x.view(grads[0].shape), chip.weight_gradient(ctx.weight, grad_weight), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.chip = chip
        ctx.save_for_backward(cos, sin)
        return _rotate(chip, _half(x, "queries or keys"), cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, _rotate(ctx.chip, grads[0].contiguous(), cos, sin, -1), None, None


def _rotate(chip: Mt3000, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    y = torch.empty_like(x)
    chip.run("rotary", layer.rotary(chip.chip, *x.shape, sign), {"X": x, "cos": cos, "sin": sin, "Y": y})
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, keys, kv_heads, d = k.shape
        queries, group = q.shape[1], q.shape[2] // kv_heads
        heads = Heads(batch * kv_heads, group, queries, keys, d)
        by_head = {"Q": _by_head(_half(q, "queries"), kv_heads)}
        by_head |= {
            name: _by_head(_half(x, "keys or values"), kv_heads).squeeze(1)
            for name, x in (("K", k), ("V", v))
        }
        o = torch.empty_like(by_head["Q"])
        lse = o.new_empty(o.shape[:3], dtype=torch.float32)
        chip.run("attention", best_attention(chip.chip, heads, False).schedule, {**by_head, "O": o, "L": lse})
        ctx.chip, ctx.heads, ctx.shapes = chip, heads, (q.shape, k.shape)
        ctx.save_for_backward(by_head["Q"], by_head["K"], by_head["V"], o, lse)
        return _by_token(o, q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        q_shape, k_shape = ctx.shapes
        tensors = {
            "Q": q,
            "K": k,
            "V": v,
            "O": o,
            "L": lse,
            "dO": _by_head(grads[0].contiguous(), k_shape[2]),
        }
        results = {"dQ": torch.empty_like(q), "dK": torch.empty_like(k), "dV": torch.empty_like(v)}
        schedule = best_attention(ctx.chip.chip, ctx.heads, True).schedule
        ctx.chip.run("attention gradient", schedule, tensors | results)
        grad_k, grad_v = (_by_token(results[name].unsqueeze(1), k_shape) for name in ("dK", "dV"))
        return None, _by_token(results["dQ"], q_shape), grad_k, grad_v


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """[batch, seq, heads, d] to [batch * kv_heads, group, seq, d]"""
    batch, seq, heads, d = x.shape
    return (
        x.view(batch, seq, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()
    )


def _by_token(x: Tensor, shape: torch.Size) -> Tensor:
    batch = shape[0]
    return x.view(batch, -1, *x.shape[1:]).permute(0, 3, 1, 2, 4).reshape(shape)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = _half(gate, "the gate"), _half(up, "the up projection")
        y = torch.empty_like(gate)
        tensors = {"gate": gate.view(-1), "up": up.view(-1), "Y": y.view(-1)}
        chip.run("swiglu", layer.swiglu_forward(chip.chip, y.numel()), tensors)
        ctx.chip = chip
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        tensors = {"gate": gate, "up": up, "dY": grads[0].contiguous(), "dgate": grad_gate, "dup": grad_up}
        flat = {name: tensor.view(-1) for name, tensor in tensors.items()}
        ctx.chip.run("swiglu gradient", layer.swiglu_backward(ctx.chip.chip, gate.numel()), flat)
        return None, grad_gate, grad_up


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, a: Tensor, b: Tensor) -> Tensor:
        a, b = _half(a, "a residual"), _half(b, "a residual")
        y = torch.empty_like(a)
        chip.run(
            "residual", layer.add(chip.chip, y.numel()), {"A": a.view(-1), "B": b.view(-1), "Y": y.view(-1)}
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0], grads[0]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, ids: Tensor, weight: Tensor) -> Tensor:
        flat = ids.reshape(-1).contiguous()
        y = weight.new_empty(len(flat), weight.shape[1])
        tensors = {"W": _half(weight, "the embedding"), "ids": flat, "Y": y}
        chip.run("embedding", layer.embedding_forward(chip.chip, len(flat), *weight.shape), tensors)
        ctx.chip, ctx.weight = chip, weight
        ctx.save_for_backward(flat)
        return y.view(*ids.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (flat,), chip, weight = ctx.saved_tensors, ctx.chip, ctx.weight
        total = torch.empty(weight.shape, dtype=torch.float32)
        tensors = {"dW": total, "ids": flat, "dY": grads[0].reshape(len(flat), -1).contiguous()}
        chip.run("embedding gradient", layer.embedding_backward(chip.chip, len(flat), *weight.shape), tensors)
        return None, None, chip.weight_gradient(weight, total.to(weight.dtype))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chip: Mt3000, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = _half(logits, "the logits"), targets.contiguous()
        loss, lse = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
        tensors = {"logits": logits, "target": targets, "loss": loss, "lse": lse}
        chip.run("cross entropy", layer.cross_entropy_forward(chip.chip, *logits.shape), tensors)
        ctx.chip = chip
        ctx.save_for_backward(logits, targets, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        grad = torch.empty_like(logits)
        tensors = {
            "logits": logits,
            "target": targets,
            "lse": lse,
            "dloss": grads[0].float().contiguous(),
            "grad": grad,
        }
        ctx.chip.run(
            "cross entropy gradient", layer.cross_entropy_backward(ctx.chip.chip, *logits.shape), tensors
        )
        return None, grad, None
