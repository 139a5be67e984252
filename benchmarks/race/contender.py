"""What a tool must do to take part, and the list of those that do."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from race.rows import Case


class Contender(Protocol):
    """One rank of one tool, its process group initialised."""

    def train(self, first: int, count: int) -> list[float]:
        """Runs steps `first` to `first + count - 1` and returns when nothing of them is left to do: no message
        under way, no update outstanding. Returns this rank's losses, one per step (mean over its tokens), or
        none where it has none."""

    def details(self) -> dict[str, Any]:
        """What else the tool can tell of the last window, as JSON."""


Maker = Callable[[Case, int, Path], Contender]
"""Case, rank and token store to a contender."""

TOOLS: dict[str, tuple[str, str]] = {
    "ratrain": ("race.ratrain_runtime", "make"),
    "ddp": ("race.torch_data_parallel", "make_ddp"),
    "zero-redundancy-optimizer": ("race.torch_data_parallel", "make_zero_redundancy"),
    "fsdp2": ("race.torch_data_parallel", "make_fsdp2"),
    "torch-1f1b": ("race.torch_pipeline", "make_1f1b"),
    "torch-gpipe": ("race.torch_pipeline", "make_gpipe"),
    "torch-interleaved": ("race.torch_pipeline", "make_interleaved"),
    "torch-zbv": ("race.torch_pipeline", "make_zbv"),
    "deepspeed-zero": ("race.deepspeed_tools", "make_zero"),
    "deepspeed-pipeline": ("race.deepspeed_tools", "make_pipeline"),
}
"""Module and function that make each tool's contender; imported where it runs."""


def maker(tool: str) -> Maker:
    """The function that makes a contender of `tool`."""
    module, function = TOOLS[tool]
    made: Maker = getattr(import_module(module), function)
    return made
