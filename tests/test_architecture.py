"""The import rules: which folder may read which, and what must run without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ratrain"

MAY_IMPORT = {
    "program": set(),
    "model": set(),
    "data": set(),
    "machine": {"model.spec"},
    "simulate": {"program"},
    "plan": {
        "program",
        "simulate",
        "model.spec",
        "model.activations",
        "model.operators",
        "model.tensor_slice",
        "machine",
        "config",
    },
    "runtime": {"program", "model", "data", "machine.mt3000", "config"},
    "report": {"program", "plan", "config"},
    "commands": {"program", "model", "data", "machine", "simulate", "plan", "runtime", "report"}
    | {"config", "run_folder", "measured"},
}
"""What each folder may import besides itself and `errors`: folders, or single modules of one."""

PLAIN_MODEL_MODULES = ("model/__init__.py", "model/spec.py", "model/activations.py")

HEAVY = {"torch", "transformers"}

TORCH_MODULES = {
    "machine/measure.py": "times this machine's operators and links",
    "machine/measure_links.py": "times this machine's operators and links",
}
"""Modules outside runtime/ and model/ that may read the model's layers and torch, and why."""


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py"))


def imported(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names that a module imports, anywhere in it; `from a import b` counts as a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_folder_has_a_rule() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    allowed = {f"ratrain.{name}" for name in MAY_IMPORT[folder] | {folder, "errors"}}
    for path in (SOURCE / folder).rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() in TORCH_MODULES:
            continue
        for name in imported(path):
            if name.startswith("ratrain."):
                steps = name.split(".")
                prefixes = {".".join(steps[:k]) for k in range(2, len(steps) + 1)}
                assert prefixes & allowed, f"{path.relative_to(SOURCE)} imports {name}"


def test_heavy_imports_stay_in_the_runtime_and_the_model() -> None:
    for path in modules():
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(("runtime/", "model/")) or name in TORCH_MODULES or "mt3000/torch" in name:
            continue
        heavy = {n.split(".")[0] for n in imported(path, top_level_only=True)} & HEAVY
        assert not heavy, f"{name} imports {', '.join(heavy)} when it is imported"


def test_planning_needs_no_torch() -> None:
    """Everything but the runtime and the model's own layers imports with torch blocked."""
    names = []
    for path in modules():
        name = path.relative_to(SOURCE).as_posix()
        model = name.startswith("model/") and name not in PLAIN_MODEL_MODULES
        if name.startswith("runtime/") or model or name in TORCH_MODULES or "mt3000/torch" in name:
            continue
        dotted = "ratrain." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        names.append(dotted.removesuffix(".__init__"))
    script = (
        "import importlib, sys\n"
        f"for blocked in {sorted(HEAVY)}: sys.modules[blocked] = None\n"
        f"for name in {[n for n in names if not n.endswith('__main__')]}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
