"""What each kernel computes, in NumPy on scratchpad views: FP16 operands, FP32 arithmetic and accumulation
(FP64 throughout for an FP64 schedule)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ratrain.machine.mt3000.schedule import Env


@dataclass(frozen=True)
class Call:
    """One kernel call. `views`: role to array, in the order of `dims[role]`; `names`: role to dimension name."""

    views: dict[str, np.ndarray]
    dims: dict[str, tuple[str, ...]]
    names: dict[str, str]
    values: dict[str, float]
    env: Env
    offset: int

    def wide(self, role: str) -> np.ndarray:
        """The operand in the arithmetic's precision."""
        view = self.views[role]
        return view if view.dtype.itemsize > 2 else view.astype(np.float32)

    def ordered(self, role: str, *dims: str) -> np.ndarray:
        """The operand in the arithmetic's precision, with its axes in the order `dims`."""
        have = self.dims[role]
        view = self.wide(role)
        return view if have == dims else view.transpose([have.index(dim) for dim in dims])

    def along(self, role: str, like: str) -> np.ndarray:
        """A vector operand shaped to broadcast over the axes of the operand `like`."""
        (dim,) = self.dims[role]
        shape = [-1 if other == dim else 1 for other in self.dims[like]]
        return self.wide(role).reshape(shape)


@dataclass(frozen=True)
class Numeric:
    """`writes`: roles the kernel writes; `updates`: those of them that it also reads."""

    apply: Callable[[Call], None]
    writes: frozenset[str]
    updates: frozenset[str]


KERNELS: dict[str, Numeric] = {}


def kernel(
    name: str, writes: str, updates: str = ""
) -> Callable[[Callable[[Call], None]], Callable[[Call], None]]:
    def register(apply: Callable[[Call], None]) -> Callable[[Call], None]:
        updated = frozenset(updates.split())
        KERNELS[name] = Numeric(apply, frozenset(writes.split()) | updated, updated)
        return apply

    return register


@kernel("fill", writes="out")
def fill(call: Call) -> None:
    call.views["out"][...] = call.values.get("value", 0.0)


@kernel("gemm", writes="", updates="c")
def gemm(call: Call) -> None:
    m, n, k = (call.names[role] for role in "mnk")
    product = call.ordered("a", m, k) @ call.ordered("b", k, n)
    target = call.views["c"]
    target += product if call.dims["c"] == (m, n) else product.T


@kernel("transpose", writes="dst")
def transpose(call: Call) -> None:
    have, want = call.dims["src"], call.dims["dst"]
    call.views["dst"][...] = call.views["src"].transpose([have.index(dim) for dim in want])


@kernel("cast", writes="dst")
def cast(call: Call) -> None:
    with np.errstate(over="ignore"):
        call.views["dst"][...] = call.views["src"]


@kernel("sum_shares", writes="dst")
def sum_shares(call: Call) -> None:
    """Adds in the order of the shares, so that the result does not depend on timing."""
    shares = call.views["src"]
    total = shares[0].copy()
    for share in shares[1:]:
        total += share
    call.views["dst"][...] = total


@kernel("accumulate", writes="", updates="dst")
def accumulate(call: Call) -> None:
    call.views["dst"][...] += call.wide("src")


# Attention. Scores lie with the keys down and the queries across: [t, q].


def _masked(call: Call, scores: np.ndarray) -> np.ndarray:
    """Scores with minus infinity where a key lies after its query (values: causal)."""
    if call.values["causal"]:
        q, t = call.env[call.names["q"]], call.env[call.names["t"]]
        late = np.asarray(t)[:, None] > np.asarray(q)[None, :] + call.offset
        scores[late] = -np.inf
    return scores


@kernel("online_softmax", writes="p", updates="top total acc")
def online_softmax(call: Call) -> None:
    """One block of keys: running maximum `top`, sum `total` and accumulator `acc` (rescaled), block of P."""
    scores = _masked(call, call.views["s"] * np.float32(call.values["scale"]))
    top, total = call.views["top"], call.views["total"]
    higher = np.maximum(top, scores.max(axis=0))
    shrink = np.exp(top - higher)
    weights = np.exp(scores - higher)
    call.views["p"][...] = weights
    total[...] = total * shrink + weights.sum(axis=0)
    top[...] = higher
    call.views["acc"][...] *= shrink


@kernel("finish_softmax", writes="lse", updates="acc")
def finish_softmax(call: Call) -> None:
    total = call.views["total"]
    call.views["acc"][...] /= total
    call.views["lse"][...] = call.views["top"] + np.log(total)


@kernel("probability", writes="p")
def probability(call: Call) -> None:
    """P of a block from its scores and the saved row log-sum-exp."""
    scores = _masked(call, call.views["s"] * np.float32(call.values["scale"]))
    call.views["p"][...] = np.exp(scores - call.views["lse"])


@kernel("row_dot", writes="out")
def row_dot(call: Call) -> None:
    call.views["out"][...] = np.einsum("qd,qd->q", call.wide("a"), call.wide("b"))


@kernel("score_gradient", writes="", updates="p")
def score_gradient(call: Call) -> None:
    """dS over P: dS = P (dP - D) scale."""
    with np.errstate(over="ignore"):
        change = (call.views["dp"] - call.views["delta"]) * np.float32(call.values["scale"])
        call.views["p"][...] = call.wide("p") * change


# Row operators.


@kernel("rmsnorm_forward", writes="y rstd")
def rmsnorm_forward(call: Call) -> None:
    x = call.wide("x")
    rstd = 1 / np.sqrt(np.mean(x * x, axis=1) + call.values["eps"])
    call.views["rstd"][...] = rstd
    call.views["y"][...] = x * rstd[:, None] * call.wide("w")


@kernel("rmsnorm_backward", writes="dx", updates="dw")
def rmsnorm_backward(call: Call) -> None:
    x, dy, rstd = call.wide("x"), call.wide("dy"), call.wide("rstd")[:, None]
    normal = x * rstd
    call.views["dw"][...] += (dy * normal).sum(axis=0)
    inner = dy * call.wide("w")
    call.views["dx"][...] = rstd * (inner - normal * np.mean(inner * normal, axis=1, keepdims=True))


@kernel("rotary", writes="y")
def rotary(call: Call) -> None:
    """Half-split rotation of x [r, head, d] by cos, sin [r, d/2]; `sign` -1 for the gradient."""
    x = call.wide("x")
    half = x.shape[-1] // 2
    cos, sin = call.wide("cos")[:, None, :], call.wide("sin")[:, None, :] * np.float32(call.values["sign"])
    low, high = x[..., :half], x[..., half:]
    call.views["y"][..., :half] = low * cos - high * sin
    call.views["y"][..., half:] = high * cos + low * sin


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


@kernel("swiglu_forward", writes="y")
def swiglu_forward(call: Call) -> None:
    gate = call.wide("gate")
    with np.errstate(over="ignore"):
        call.views["y"][...] = gate * _sigmoid(gate) * call.wide("up")


@kernel("swiglu_backward", writes="dgate dup")
def swiglu_backward(call: Call) -> None:
    gate, up, dy = call.wide("gate"), call.wide("up"), call.wide("dy")
    chance = _sigmoid(gate)
    with np.errstate(over="ignore"):
        call.views["dup"][...] = dy * gate * chance
        call.views["dgate"][...] = dy * up * chance * (1 + gate * (1 - chance))


@kernel("add", writes="y")
def add(call: Call) -> None:
    with np.errstate(over="ignore"):
        call.views["y"][...] = call.wide("a") + call.wide("b")


@kernel("bias_forward", writes="y")
def bias_forward(call: Call) -> None:
    with np.errstate(over="ignore"):
        call.views["y"][...] = call.wide("x") + call.wide("w")


@kernel("bias_backward", writes="", updates="dw")
def bias_backward(call: Call) -> None:
    call.views["dw"][...] += call.wide("dy").sum(axis=0)


@kernel("xent_statistics", writes="", updates="top total picked")
def xent_statistics(call: Call) -> None:
    """One tile of the vocabulary: running maximum, sum of exponentials, and the target's logit if it is here."""
    logits = call.wide("logits")
    top, total = call.views["top"], call.views["total"]
    higher = np.maximum(top, logits.max(axis=1))
    total[...] = total * np.exp(top - higher) + np.exp(logits - higher[:, None]).sum(axis=1)
    top[...] = higher
    rows, columns = _targets(call)
    call.views["picked"][rows] = logits[rows, columns]


@kernel("xent_finish", writes="loss lse")
def xent_finish(call: Call) -> None:
    lse = call.views["top"] + np.log(call.views["total"])
    call.views["lse"][...] = lse
    call.views["loss"][...] = np.where(call.views["target"] >= 0, lse - call.views["picked"], 0)


@kernel("xent_gradient", writes="grad")
def xent_gradient(call: Call) -> None:
    """(softmax - one hot) times the row's output gradient; 0 for rows without a target."""
    scale = np.where(call.views["target"] >= 0, call.views["dloss"], 0)[:, None]
    gradient = np.exp(call.wide("logits") - call.views["lse"][:, None])
    rows, columns = _targets(call)
    gradient[rows, columns] -= 1
    call.views["grad"][...] = gradient * scale


def _targets(call: Call) -> tuple[np.ndarray, np.ndarray]:
    here = call.env[call.names["v"]]
    target = call.views["target"]
    rows = np.flatnonzero((target >= here.start) & (target < here.stop))
    return rows, target[rows] - here.start


@kernel("adamw", writes="view", updates="p m v")
def adamw(call: Call) -> None:
    """AdamW with decoupled decay (Loshchilov and Hutter 2019), in the order of torch.optim.AdamW."""
    value = call.values
    p, m, v = call.views["p"], call.views["m"], call.views["v"]
    gradient = call.wide("g") * np.float32(value["grad_scale"])
    p *= np.float32(1 - value["lr"] * value["weight_decay"])
    m += (gradient - m) * np.float32(1 - value["beta1"])
    v *= np.float32(value["beta2"])
    v += np.float32(1 - value["beta2"]) * gradient * gradient
    denominator = np.sqrt(v) / np.float32(value["bias2"] ** 0.5) + np.float32(value["eps"])
    p -= np.float32(value["lr"] / value["bias1"]) * (m / denominator)
    with np.errstate(over="ignore"):
        call.views["view"][...] = p
