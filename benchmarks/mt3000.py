"""The MT-3000 backend against what is known: published rates, its own executor, and a whole training step.

python benchmarks/mt3000.py                     tables of docs/mt3000.md, and the roofline picture
python benchmarks/mt3000.py --train 100         also 100 updates of a tiny Llama against torch
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ratrain.machine.mt3000.attention import Heads, best_attention
from ratrain.machine.mt3000.chip import Chip, load_chip
from ratrain.machine.mt3000.cost import Cost
from ratrain.machine.mt3000.executor import execute
from ratrain.machine.mt3000.gemm import Problem
from ratrain.machine.mt3000.gemm_search import best_gemm
from ratrain.machine.mt3000.profile import operator_costs, update_seconds
from ratrain.machine.mt3000.roofline import draw_roofline
from ratrain.machine.mt3000.validation import Point, ft_m7032_points, mt3000_point
from ratrain.model.operators import forward_operators
from ratrain.model.spec import ModelSpec

MODELS: dict[str, tuple[str, int, int, int, int, int, int]] = {
    "LLaMA-2-7B": ("llama", 4096, 32, 32, 32, 11008, 32000),
    "Baichuan2-13B": ("llama", 5120, 40, 40, 40, 13696, 125696),
    "Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "LLaMA-2-70B": ("llama", 8192, 80, 64, 8, 28672, 32000),
}
"""Public shapes: kind, hidden, layers, heads, key-value heads, MLP width, vocabulary. Baichuan2-13B is priced
with Llama's operators of its shape."""
SEQUENCE = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=0, metavar="UPDATES", help="updates of a tiny Llama")
    parser.add_argument("--roofline", type=Path, default=Path("docs/figures/mt3000-roofline.png"))
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    chip = load_chip()
    results: dict[str, Any] = {}
    print("Published points, percent of peak")
    results["points"] = points([*ft_m7032_points(), mt3000_point(chip)])
    print("\nFP16 8192 x 4096 x 4096 over DDR rates: with the efficiency kept, and refitted")
    results["sensitivity"] = sensitivity(chip)
    print("\nExecutor against model")
    results["agreement"] = agreement(chip)
    print(f"\nOne training step, micro-batch 1, sequence {SEQUENCE}")
    results["steps"] = {name: model_step(chip, name) for name in MODELS}
    args.roofline.parent.mkdir(parents=True, exist_ok=True)
    draw_roofline(labelled_costs(chip), chip, "fp16", args.roofline)
    print(f"\nroofline: {args.roofline}")
    if args.train:
        print(f"\n{args.train} updates of a tiny Llama: FP16 on the chip against FP32 in torch")
        results["training"] = train(chip, args.train)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def points(found: list[Point]) -> list[dict[str, Any]]:
    for point in found:
        print(
            f"  {point.label:42} measured {point.measured:5.1f}  model {point.predicted:5.1f}  {point.difference:+.1f}"
        )
    return [{"label": p.label, "measured": p.measured, "model": round(p.predicted, 2)} for p in found]


def sensitivity(chip: Chip) -> list[dict[str, float]]:
    """The FP16 point with the shipped efficiency, and the efficiency that would fit it, at other DDR rates."""
    problem, rows = Problem(8192, 4096, 4096), []
    target = 5686.34e9
    for rate in (30e9, 32e9, 34e9, 36e9, 38e9):
        faster = chip.with_ddr(rate)
        kept = best_gemm(faster, problem).percent_of_peak
        low, high = 0.6, 1.0
        for _ in range(10):
            middle = (low + high) / 2
            above = best_gemm(replace(faster, efficiency=middle), problem).flops_per_second > target
            low, high = (low, middle) if above else (middle, high)
        rows.append(
            {
                "ddr_gb_per_s": rate / 1e9,
                "percent_of_peak": round(kept, 2),
                "fitted_efficiency": round(high, 4),
            }
        )
        print(f"  {rate / 1e9:.0f} GB/s: {kept:.1f} % of peak; fitted efficiency {high:.3f}")
    return rows


def agreement(chip: Chip) -> list[dict[str, Any]]:
    """Bytes and cycles counted by the executor against the model, error against FP64, speed of the executor."""
    random = np.random.default_rng()
    rows = []
    for problem in (
        Problem(1000, 1500, 900),
        Problem(700, 1300, 2100, "fp16", "nt"),
        Problem(333, 777, 3000, "fp16", "tn"),
    ):
        a = random.standard_normal((problem.m, problem.k)).astype(np.float16)
        b = random.standard_normal((problem.k, problem.n)).astype(np.float16)
        c = np.full((problem.m, problem.n), np.nan, np.float16)
        stored = {"A": a.T if problem.trans == "tn" else a, "B": b.T if problem.trans == "nt" else b}
        cost = best_gemm(chip, problem)
        start = time.perf_counter()
        counted = execute(
            cost.schedule, chip, {name: np.ascontiguousarray(x) for name, x in stored.items()} | {"C": c}
        )
        seconds = time.perf_counter() - start
        exact = a.astype(np.float64) @ b.astype(np.float64)
        rows.append(
            {
                "operator": str(problem),
                "bytes_equal": counted.bytes == cost.bytes,
                "cycles_ratio": counted.cycles / cost.cycles,
                "error": float(np.linalg.norm(c - exact) / np.linalg.norm(exact)),
                "gflops": problem.flops / seconds / 1e9,
            }
        )
        row = rows[-1]
        print(
            f"  {row['operator']:32} bytes equal {row['bytes_equal']}, cycles x{row['cycles_ratio']:.4f}, "
            f"error {row['error']:.1e}, {row['gflops']:.1f} GFLOP/s here"
        )
    return rows


def spec_of(name: str) -> ModelSpec:
    kind, hidden, layers, heads, kv_heads, width, vocabulary = MODELS[name]
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    return ModelSpec.from_dict(config, name)


def model_step(chip: Chip, name: str) -> dict[str, Any]:
    """Forward and backward of every block; matrix products and attention count as the model's operations."""
    spec = spec_of(name)
    start = time.process_time()
    seconds: dict[str, float] = {}
    bound: dict[str, float] = {}
    flops = 0.0
    for block, times in (("embed", 1), ("layer0", spec.layers), ("head", 1)):
        for operator in forward_operators(spec, block, 1, SEQUENCE):
            if operator.kind in ("matmul", "attention"):
                flops += times * operator.flops * (3.0 if operator.kind == "matmul" else 3.5)
            for backward in (False, True):
                for cost in operator_costs(chip, operator, backward):
                    label = operator.kind if operator.kind in ("matmul", "attention") else operator.name
                    seconds[label] = seconds.get(label, 0.0) + times * cost.seconds
                    bound[cost.bound] = bound.get(cost.bound, 0.0) + times * cost.seconds
    spent = time.process_time() - start
    total = sum(seconds.values())
    print(
        f"  {name}: {total:.2f} s, {flops / total / 1e12:.2f} TFLOP/s per cluster; priced in {spent:.2f} s of CPU; "
        f"AdamW on 1/128 of it {update_seconds(chip, spec.parameter_count() // 128):.3f} s"
    )
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    print("    " + ", ".join(f"{label} {100 * s / total:.1f} %" for label, s in parts))
    print("    bound by " + ", ".join(f"{label} {100 * s / total:.1f} %" for label, s in bound.items()))
    return {
        "seconds": total,
        "tflops": flops / total / 1e12,
        "operators": seconds,
        "bound": bound,
        "priced_in": spent,
    }


def labelled_costs(chip: Chip) -> dict[str, Cost]:
    """One layer of LLaMA-2-7B and its head, for the picture."""
    found: dict[str, Cost] = {}
    spec = spec_of("LLaMA-2-7B")
    wanted = (
        "q_proj",
        "gate_proj",
        "down_proj",
        "attention",
        "lm_head",
        "swiglu",
        "input_layernorm",
        "rotary",
    )
    for block in ("layer0", "head"):
        for operator in forward_operators(spec, block, 1, SEQUENCE):
            if operator.name in wanted:
                found[operator.name] = operator_costs(chip, operator, False)[0]
                if operator.kind == "attention":
                    found["attention backward"] = best_attention(
                        chip, Heads(32, 1, SEQUENCE, SEQUENCE, 128), True
                    )
                if operator.name == "down_proj":
                    for label, cost in zip(("input", "weight"), operator_costs(chip, operator, True)):
                        found[f"down_proj {label} gradient"] = cost
    return found


def train(chip: Chip, updates: int) -> dict[str, Any]:
    """The same updates twice from one start: FP16 through the executor with dynamic loss scaling and FP32 master
    weights, and FP32 in torch. The largest relative distance of the two loss curves is the result."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ratrain.machine.mt3000.torch_operators import Mt3000, install, install_norm

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    reference = LlamaForCausalLM(config)
    half = LlamaForCausalLM(config)
    half.load_state_dict(reference.state_dict())
    half.half()
    device = Mt3000(chip)
    for layer in half.model.layers:
        install(layer, device)
    install_norm(half.model.norm, device)
    hyper = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(reference.parameters(), **hyper)
    state = [[p.detach().float().reshape(-1).clone() for p in reference.parameters()]]
    state += [[torch.zeros_like(p) for p in state[0]] for _ in range(2)]
    scale, step, curves = 2.0**15, 0, ([], [])
    generator = torch.Generator().manual_seed(1)
    # A learnable stream: each token is its predecessor times 5 plus a little noise.
    start = time.perf_counter()
    for _ in range(updates):
        ids = torch.empty(2, 49, dtype=torch.int64)
        ids[:, 0] = torch.randint(0, 256, (2,), generator=generator)
        for t in range(1, 49):
            ids[:, t] = (ids[:, t - 1] * 5 + torch.randint(0, 3, (2,), generator=generator)) % 256
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        logits = reference(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curves[0].append(loss.item())
        x = device.embedding(inputs, half.model.embed_tokens.weight)
        tables = half.model.rotary_emb(x.float(), torch.arange(48)[None])
        for layer in half.model.layers:
            x = layer(x, position_embeddings=tables)
        mine = device.head_loss(half.model.norm(x), half.lm_head.weight, targets, targets.numel())
        curves[1].append(mine.item())
        for p in half.parameters():
            p.grad = None
        (mine * scale).backward()
        if not all(torch.isfinite(p.grad).all() for p in half.parameters()):
            scale /= 2
            continue
        step += 1
        for p, master, m, v in zip(half.parameters(), *state):
            view = p.data.view(-1)
            device.adamw_(master, m, v, p.grad.view(-1), view, step=step, grad_scale=1 / scale, **hyper)
    deviation = max(abs(a - b) / a for a, b in zip(*curves))
    print(
        f"  loss {curves[0][0]:.3f} to {curves[0][-1]:.3f}; largest relative deviation {100 * deviation:.4f} %; "
        f"{step} updates applied; {device.account.seconds / updates * 1e3:.2f} ms an update on the chip, "
        f"{(time.perf_counter() - start) / updates:.2f} s here"
    )
    return {
        "deviation": deviation,
        "torch": curves[0],
        "mt3000": curves[1],
        "chip_seconds": device.account.seconds,
    }


if __name__ == "__main__":
    main()
