"""`ratrain export`: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ratrain.config import parse_bytes
from ratrain.errors import UserError


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("checkpoint", type=Path, help="checkpoint, or run folder (its newest checkpoint)")
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="of the weights")
    parser.add_argument(
        "--shard", default="5 GB", metavar="SIZE", help="largest file of weights, with its unit"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.model.spec import load_spec
    from ratrain.run_folder import CHECKPOINTS, MODEL_JSON, TOKENIZER
    from ratrain.runtime.manifest import check_fits, complete, read_manifest

    folder: Path = args.checkpoint
    if (folder / CHECKPOINTS).is_dir():
        found = complete(folder / CHECKPOINTS)
        if not found:
            raise UserError(f"{folder}: no complete checkpoint in it; train further, or name one")
        folder = found[-1]
    manifest = read_manifest(folder)
    home = folder.resolve().parent.parent
    if not (home / MODEL_JSON).is_file():
        raise UserError(f"{folder}: no {MODEL_JSON} in {home}; leave checkpoints inside their run folder")
    spec = load_spec(home / MODEL_JSON)
    check_fits(manifest, folder, {name: list(p.shape) for name, p in spec.all_parameters().items()}, {})
    _check_target(args.folder)

    from ratrain.model.export import export
    from ratrain.runtime.build import DTYPES
    from ratrain.runtime.checkpoint import read_weights

    read = read_weights(folder, manifest, spec)
    dtype = DTYPES[args.dtype]
    tokenizer = home / TOKENIZER
    extra = sorted(p for p in tokenizer.iterdir() if p.is_file()) if tokenizer.is_dir() else []
    tensors = ((name, read(name).to(dtype)) for name in manifest.shapes)
    export(args.folder, spec, tensors, extra, parse_bytes(args.shard, "--shard"), replace=True)
    if args.json:
        print(json.dumps({"checkpoint": str(folder), "step": manifest.step, "folder": str(args.folder)}))
        return 0
    print(f"exported {folder} (step {manifest.step}) to {args.folder}")
    return 0


def _check_target(folder: Path) -> None:
    """UserError if `folder` holds anything but an earlier export, which alone may be replaced."""
    from ratrain.model.weights import has_weights

    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    flat = folder.is_dir() and all(path.is_file() for path in folder.iterdir())
    if not (flat and (folder / "config.json").is_file() and has_weights(folder)):
        raise UserError(f"{folder}: exists and is no exported model; choose another folder, or remove it")
