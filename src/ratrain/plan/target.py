"""Where a plan is to run: memory and operators of one device, and what its costs can be taken from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ratrain.config import AUTO, MachineConfig, parse_bytes
from ratrain.machine.platform import Platform, load_platform
from ratrain.machine.profile import Profile, load_profile

LOCAL = "local"

_UNMEASURED_BASE = 500_000_000
"""Bytes of a Python process with torch and transformers imported, where no profile has measured it."""


@dataclass(frozen=True)
class Target:
    """name          as in machine.platform
    memory        bytes that one device has for its process
    runtime_base  bytes of them that a process holds before its model
    operators     whose operators compute, as in Plan
    platform, profile  what costs are taken from; both None on an unmeasured machine
    """

    name: str
    memory: int
    runtime_base: int
    operators: str
    platform: Platform | None = None
    profile: Profile | None = None


def load_target(config: MachineConfig, devices: int) -> Target:
    """The machine that `machine.platform` names: this one, a platform, or a profile (.json).

    `devices` processes share this machine's memory evenly where `machine.memory` is left to it.
    """
    memory = None if config.memory == AUTO else parse_bytes(config.memory, "machine.memory")
    if config.platform == LOCAL:
        return Target(LOCAL, memory or _physical_memory() // devices, _UNMEASURED_BASE, "torch")
    if config.platform.endswith(".json"):
        profile = load_profile(Path(config.platform))
        base = int(profile.runtime_base_memory)
        return Target(config.platform, memory or _physical_memory() // devices, base, "torch", None, profile)
    platform = load_platform(config.platform)
    operators = "mt3000" if platform.device.operator_model.name == "mt3000" else "torch"
    base = int(platform.device.runtime_base_memory)
    return Target(platform.name, memory or int(platform.device.memory), base, operators, platform)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
