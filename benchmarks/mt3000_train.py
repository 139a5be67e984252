"""A whole training run on the emulated MT-3000 against torch, through the same runtime.

    python benchmarks/mt3000_train.py [--updates 100]

Two runs of `ratrain train` on the same text, P=2, all passes: fp32 by torch, and fp16 views and gradients with
a dynamic loss scale by the tile executor. Prints the largest relative deviation of the loss (the paper reports
0.081 %) and what the chip would have taken for a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-mt3000.toml"


def train(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The updates of one run."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "ratrain",
        "train",
        str(EXAMPLE),
        "--out",
        str(folder),
        "--resume",
        "never",
    ]
    subprocess.run([*command, *chosen], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=100)
    updates = parser.parse_args().updates
    with tempfile.TemporaryDirectory() as name:
        length = f"train.steps={updates}"
        torch = train(Path(name) / "torch", length, "run.backend=torch", "precision.view=fp32")
        chip = train(Path(name) / "chip", length)
    deviation = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(torch, chip))
    seconds = [entry["chip_s"] for entry in chip[1:]]
    print(f"{updates} updates, loss {torch[0]['loss']:.4f} to {torch[-1]['loss']:.4f} by torch in fp32")
    print(f"largest relative deviation on the chip {100 * deviation:.4f} % (the paper's bound: 0.081 %)")
    print(f"skipped updates {sum(entry['skipped'] for entry in chip)}")
    print(f"chip time of rank 0 a step: {1e3 * sum(seconds) / len(seconds):.2f} ms")


if __name__ == "__main__":
    main()
