"""What a run asks of the planner: the settings that are given, and which choices are left open."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ratrain.config import AUTO, Config
from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.model.tensor_slice import tensor_slice
from ratrain.plan.activations import ActivationModel
from ratrain.plan.plan import Plan, check_batches, fingerprint
from ratrain.plan.precision import Precision, resolve_precision
from ratrain.plan.target import Target, load_target
from ratrain.program.layout import EMBED, HEAD, RUNGS, place
from ratrain.program.passes import PASSES


@dataclass(frozen=True)
class Request:
    """A configuration as the planner reads it. None stands for a choice that is left to the planner.

    policy   block or "stage<i>" or "default" -> rung; None: the planner's choice
    """

    spec: ModelSpec
    target: Target
    devices: int
    precision: Precision
    seq_len: int
    global_batch: int
    gated: bool
    passes: tuple[str, ...]
    pipeline: int | None
    data: int | None
    tensor: int | None
    zero: int | None
    layers: tuple[int, ...] | None
    micro_batch: int | None
    policy: dict[str, str] | None
    ahead: int | None
    elide: bool | None
    grouped: int | None

    @property
    def open(self) -> bool:
        """Whether anything but memory-neutral details is left to the planner."""
        fixed = (self.pipeline, self.data, self.zero, self.micro_batch, self.policy)
        return None in fixed or self.layers is None

    def plan(
        self, *, layers: tuple[int, ...], data: int, zero: int, micro_batch: int, **choices: Any
    ) -> Plan:
        """The plan of these choices; UserError if they do not go together."""
        spec = self.spec
        given: dict[str, Any] = {
            "ahead": 1 if self.ahead is None else self.ahead,
            "elide": True if self.elide is None else self.elide,
            "grouped": self.grouped or 1,
            "passes": self.passes,
        }
        if self.policy is not None:
            given["rungs"] = resolve_policy(self.policy, layers)
        precision = self.precision
        activations = ActivationModel(
            tensor_slice(spec, choices.get("tensor", 1)),
            self.target.operators,
            micro_batch,
            self.seq_len,
            precision.view_bytes,
            precision.grad_bytes,
            choices.get("slice_tokens", 0),
        )
        return Plan(
            model=fingerprint(spec),
            tied=spec.tied,
            layers=layers,
            data=data,
            zero=zero,
            micro_batch=micro_batch,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            view=self.precision.view,
            grad=self.precision.grad,
            reduce=self.precision.reduce,
            gated=self.gated,
            operators=self.target.operators,
            devices=self.devices,
            budget=self.target.memory,
            runtime_base=self.target.base(activations),
            platform=self.target.name,
            **{**given, **choices},
        )


def read_request(config: Config, spec: ModelSpec, devices: int | None = None) -> Request:
    """Checks what does not depend on a layout; one UserError a line.

    devices  processes there are; None: machine.devices, or the layout's own, or this machine's core pairs
    """
    parallel, train = config.parallel, config.train
    layers = None if parallel.layers == AUTO else tuple(int(n) for n in parallel.layers)
    pipeline = _number(parallel.pipeline)
    if layers is not None and pipeline is None:
        pipeline = len(layers)
    data, tensor = _number(parallel.data), _number(parallel.tensor)
    asked = devices or _number(config.machine.devices)
    if asked is None:
        asked = pipeline * data * (tensor or 1) if pipeline and data else max(1, (os.cpu_count() or 2) // 2)
    if pipeline and data and pipeline * data * (tensor or 1) != asked:
        raise UserError(
            f"parallel.pipeline {pipeline} x parallel.data {data} are {pipeline * data} processes, but there "
            f"are {asked}; set machine.devices or --nproc to {pipeline * data}, or leave one at auto"
        )
    if spec.max_positions is not None and config.data.seq_len > spec.max_positions:
        raise UserError(
            f"data.seq_len {config.data.seq_len} is beyond the model's {spec.max_positions} positions; lower it, "
            "or raise max_position_embeddings in the model's config.json"
        )
    check_layers(spec, layers, pipeline)
    check_batches(train.global_batch, data, _number(train.micro_batch))
    return Request(
        spec=spec,
        target=load_target(config.machine, asked),
        devices=asked,
        precision=resolve_precision(config.precision),
        seq_len=config.data.seq_len,
        global_batch=train.global_batch,
        gated=train.clip > 0 or config.precision.view == "fp16",
        passes=resolve_passes(config.run.passes),
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        zero=_number(parallel.zero),
        layers=layers,
        micro_batch=_number(train.micro_batch),
        policy=_policy(config.recovery.policy),
        ahead=_number(config.recovery.ahead),
        elide=None if isinstance(config.recovery.elide, str) else config.recovery.elide,
        grouped=_number(parallel.grouped),
    )


def check_layers(spec: ModelSpec, layers: tuple[int, ...] | None, pipeline: int | None) -> None:
    """UserError if the placement does not hold every layer once, or stages are more than blocks."""
    if layers is not None:
        if sum(layers) != spec.layers:
            raise UserError(
                f"parallel.layers {list(layers)} adds up to {sum(layers)}, but the model has {spec.layers} "
                "decoder layers; give each to one stage"
            )
        if pipeline is not None and len(layers) != pipeline:
            raise UserError(
                f"parallel.layers has {len(layers)} entries, but parallel.pipeline is {pipeline}; "
                "give one number per stage"
            )
        if 0 in layers[1:-1]:
            raise UserError(
                f"parallel.layers {list(layers)}: stage {layers.index(0, 1)} would be empty; 0 is legal only "
                "for the first and the last stage"
            )
    if pipeline is not None and pipeline > spec.layers + 2:
        raise UserError(
            f"parallel.pipeline {pipeline} is more than the model's {spec.layers} decoder layers and its "
            f"embedding and head fill; at most {spec.layers + 2}"
        )


def resolve_passes(passes: tuple[str, ...] | str) -> tuple[str, ...]:
    """Names of the passes in the order in which they are applied; UserError for an unknown one."""
    if isinstance(passes, str):
        if passes not in ("all", "none"):
            passes = tuple(name.strip() for name in passes.split(","))
        else:
            return tuple(PASSES) if passes == "all" else ()
    for name in passes:
        if name not in PASSES:
            raise UserError(f"run.passes: unknown pass {name!r}; expected all, none, or {', '.join(PASSES)}")
    return tuple(name for name in PASSES if name in passes)


def resolve_policy(policy: dict[str, str], layers: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """The rung of every block. A block's own entry comes before its stage's, that before "default"; embedding
    and head keep unless they are named themselves."""
    stages = place(layers)
    blocks = {block for stage in stages for block in stage} | {f"stage{s}" for s in range(len(stages))}
    for name in policy:
        if name not in blocks and name != "default":
            raise UserError(
                f"recovery.policy: no block or stage {name!r}; there are stage0 to stage{len(stages) - 1}, "
                f"embed, layer0 to layer{sum(layers) - 1}, head, and default"
            )
    default = policy.get("default", RUNGS[0])

    def rung(stage: int, block: str) -> str:
        if block in (EMBED, HEAD):
            return policy.get(block, RUNGS[0])
        return policy.get(block, policy.get(f"stage{stage}", default))

    return tuple(tuple(rung(s, block) for block in blocks) for s, blocks in enumerate(stages))


def _policy(policy: Any) -> dict[str, str] | None:
    if policy == AUTO:
        return None
    if isinstance(policy, str):
        return {"default": policy}
    for name, rung in policy.items():
        if rung not in RUNGS:
            raise UserError(f"recovery.policy.{name} = {rung!r}: expected one of {', '.join(RUNGS)}")
    return dict(policy)


def _number(value: int | str) -> int | None:
    return None if isinstance(value, str) else value
