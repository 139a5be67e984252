"""Configurations whose meaning must not depend on their passes, and a small set that covers all pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from ratrain.program.passes import PASSES

SUBSETS = tuple(s for n in range(len(PASSES) + 1) for s in combinations(PASSES, n))
"""Every set of passes, none first and all last."""

RECOVERIES = ("keep", "elementwise", "mlp", "inputs", "mixed")
PLACEMENTS = ((3,), (2, 1), (0, 3), (3, 0), (1, 1, 1), (0, 3, 0), (2, 1, 0))

_QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
FACTORS: dict[str, Sequence[Any]] = {
    "layers": PLACEMENTS,
    "data": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "clip": (0.0, 0.5),  # below the norms of these models, so that it clips
    "rungs": RECOVERIES,
    "ahead": (0, 1, 2),
    "elide": (True, False),
    "grouped": (1, 2, 4),
    "model": (
        {},
        {"tie_word_embeddings": True},
        {"attention_dropout": 0.1},
        _QWEN2 | {"tie_word_embeddings": True, "attention_dropout": 0.1},
    ),
    "microbatches": (1, 2, 3, 4),
    "precision": ({"view": "fp32"}, {"view": "bf16"}, {"view": "bf16", "reduce": "bf16"}),
}

SEQUENCE = {"steps": 3, "eval_every": 2}
"""Train twice, evaluate, train once, evaluate: all four program forms, and `first` twice."""


def configuration(row: Mapping[str, Any]) -> dict[str, Any]:
    """What `runtime_world.train` takes, of a row over FACTORS."""
    rest = {name: value for name, value in row.items() if name != "precision"}
    return SEQUENCE | rest | row.get("precision", {})


def processes(row: Mapping[str, Any]) -> int:
    """Ranks that a row needs."""
    return len(row["layers"]) * int(row["data"])


def groups(row: Mapping[str, Any]) -> bool:
    """Whether a row's layout takes its `grouped`, see `Layout.ungroupable`."""
    reduces_each = row["zero"] >= 2 and row["data"] > 1
    reads_twice = len(row["layers"]) == 1 and "tie_word_embeddings" in row["model"]
    return row["grouped"] == 1 or not (reduces_each or reads_twice)


def covering(most: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows over FACTORS on at most `most` processes that hold every pair of values which any such row holds.

    Greedy: of many random rows, each made to hold one uncovered pair, take the one that covers most.
    """
    names = list(FACTORS)
    pick = random.Random(seed)

    def pairs(row: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}

    def legal(row: Mapping[str, int]) -> bool:
        values = {n: FACTORS[n][row[n]] for n in row}
        return processes(values) <= most and ("grouped" not in row or groups(values))

    open_ = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(FACTORS[a])), range(len(FACTORS[b])))
        if {a, b} != {"layers", "data"} or legal({a: i, b: j})
    }
    rows: list[dict[str, int]] = []
    while open_:
        best: dict[str, int] = {}
        for _ in range(60):
            a, i, b, j = pick.choice(sorted(open_))
            row = {n: pick.randrange(len(FACTORS[n])) for n in names} | {a: i, b: j}
            if legal(row) and (not best or len(pairs(row) & open_) > len(pairs(best) & open_)):
                best = row
        if best:
            rows.append(best)
            open_ -= pairs(best)
    return [{n: FACTORS[n][at] for n, at in row.items()} for row in rows]


def full() -> Iterator[dict[str, Any]]:
    """P in 1, 2, 3 x D in 1, 2, 4 x ZeRO 0 to 3 x clipping x recovery, the other factors taking turns."""
    rest = {n: values for n, values in FACTORS.items() if n not in ("data", "zero", "clip", "rungs")}
    number = 0
    for pipeline, data, zero in product((1, 2, 3), (1, 2, 4), (0, 1, 2, 3)):
        if data == 1 and zero != 1:
            continue  # with one replica every level is the same
        placements = [p for p in PLACEMENTS if len(p) == pipeline]
        for clip, rungs in product(FACTORS["clip"], RECOVERIES):
            turn = {n: values[number // (k + 1) % len(values)] for k, (n, values) in enumerate(rest.items())}
            layers = placements[number % len(placements)]
            row = {**turn, "layers": layers, "data": data, "zero": zero, "clip": clip, "rungs": rungs}
            yield row if groups(row) else row | {"grouped": 1}
            number += 1
