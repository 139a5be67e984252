"""The reference: one plain process that trains transformers' own model with torch's own AdamW.

Of RATrain it takes what depends on seed and step only: data, initial values and learning rate. Runs are held
against it.

    python -m ratrain.runtime.plain RUN_FOLDER

trains as the run in that folder does, and prints a JSON object per update: step, loss, grad_norm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from ratrain.data.sampler import IGNORED, Sampler, Sequences
from ratrain.data.store import open_store
from ratrain.model.blocks import initial_value
from ratrain.model.families import hf_config
from ratrain.model.spec import ModelSpec
from ratrain.runtime.optimizer import Schedule
from ratrain.runtime.shard_optimizer import AdamW


class PlainTraining:
    """A model, its optimizer, and nothing else."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, seed: int, settings: AdamW) -> None:
        from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

        kinds = {"llama": LlamaForCausalLM, "mistral": MistralForCausalLM, "qwen2": Qwen2ForCausalLM}
        self.model: Any = kinds[spec.family](hf_config(spec)).to(dtype).train()
        shapes = spec.all_parameters()
        values = {name: initial_value(spec, name, p.shape, seed) for name, p in shapes.items()}
        if spec.tied:
            values["lm_head.weight"] = values["model.embed_tokens.weight"]
        self.model.load_state_dict(values, strict=True)
        self.parameters = dict(self.model.named_parameters())
        decay = settings.weight_decay
        groups = [
            {
                "params": [self.parameters[n] for n, p in shapes.items() if p.decay == each],
                "weight_decay": rate,
            }
            for each, rate in ((True, decay), (False, 0.0))
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=1.0, betas=(settings.beta1, settings.beta2), eps=settings.eps
        )

    def backward(self, data: Sequences) -> float:
        """Mean loss over the target tokens of a global batch, in one pass; its gradients are in `parameters`."""
        logits = self.model(input_ids=torch.from_numpy(data.inputs), use_cache=False).logits
        targets = torch.from_numpy(data.targets)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        self._optimizer.zero_grad()
        loss.backward()
        return loss.item()

    def update(self, lr: float, clip: float) -> float:
        """Clips (0: does not) and updates. Returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip or float("inf"))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return norm.item()


def main(folder: Path) -> None:
    """Trains what the run in `folder` trains."""
    from ratrain.config import load_config
    from ratrain.runtime.build import DTYPES

    setup = json.loads((folder / "setup.json").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    config = load_config(folder / "run.toml")
    spec = ModelSpec.from_dict(json.loads((folder / "model.json").read_text()))
    train = config.train
    settings = AdamW(train.weight_decay, train.beta1, train.beta2, train.eps)
    plain = PlainTraining(spec, DTYPES[plan["view"]], train.seed, settings)
    store = open_store(Path(setup["train"]), vocab_size=spec.vocab)
    sampler = Sampler(store, config.data.seq_len, train.global_batch, train.seed)
    schedule = Schedule(train.lr, train.lr_min_ratio, train.warmup_steps, train.steps)
    for step in range(train.steps):
        loss = plain.backward(sampler.sequences(step, range(train.global_batch)))
        norm = plain.update(schedule(step), train.clip)
        print(json.dumps({"step": step + 1, "loss": loss, "grad_norm": norm}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
