"""A Llama whose operators run on the emulated chip."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ratrain.errors import UserError
from ratrain.machine.mt3000.torch_operators import Mt3000, install, install_norm

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)]
SEQ = 24


def on_chip(model: nn.Module, take=None) -> tuple[nn.Module, Mt3000]:
    half, chip = copy.deepcopy(model).half(), Mt3000(take_gradient=take)
    for layer in half.model.layers:
        install(layer, chip)
    install_norm(half.model.norm, chip)
    return half, chip


def loss_of(model: nn.Module, chip: Mt3000, ids: torch.Tensor) -> torch.Tensor:
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    x = chip.embedding(inputs, model.model.embed_tokens.weight)
    tables = model.model.rotary_emb(x.float(), torch.arange(SEQ)[None])
    for layer in model.model.layers:
        x = layer(x, position_embeddings=tables)
    return chip.head_loss(model.model.norm(x), model.lm_head.weight, targets, targets.numel())


def plain_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(("config", "build"), FAMILIES, ids=["llama", "qwen2"])
def test_gradients_of_a_model(config, build) -> None:
    model = build(config(**SHAPE))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    half, chip = on_chip(model)
    exact = copy.deepcopy(half).double()
    for module in exact.modules():
        module.__dict__.pop("forward", None)  # the copies of the swapped operators
    ids = torch.randint(0, 200, (2, SEQ + 1))
    scale = 1024.0
    mine, right = loss_of(half, chip, ids), plain_loss(exact, ids)
    assert mine.item() == pytest.approx(right.item(), rel=1e-4)
    (mine * scale).backward()
    right.backward()
    for (name, a), (_, b) in zip(half.named_parameters(), exact.named_parameters()):
        error = (a.grad.double() / scale - b.grad).norm() / b.grad.norm()
        assert error < 5e-3, name
    assert chip.account.seconds == pytest.approx(sum(chip.account.operators.values()))
    assert {"linear", "attention gradient", "cross entropy"} <= chip.account.operators.keys()
    assert chip.account.bytes["ddr>am"] > 0
    chip.account.reset()
    assert chip.account.seconds == 0


def test_a_few_updates_follow_torch() -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    half, chip = on_chip(model)
    hyper = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **hyper)
    masters = [p.detach().reshape(-1).clone() for p in model.parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in masters]
    ids = torch.randint(0, 200, (2, SEQ + 1))
    for step in range(1, 6):
        right = plain_loss(model, ids)
        optimizer.zero_grad()
        right.backward()
        optimizer.step()
        mine = loss_of(half, chip, ids)
        (mine * 1024.0).backward()
        for p, master, (m, v) in zip(half.parameters(), masters, moments):
            chip.adamw_(
                master, m, v, p.grad.view(-1), p.data.view(-1), step=step, grad_scale=1 / 1024, **hyper
            )
            p.grad = None
        assert mine.item() == pytest.approx(right.item(), rel=8.1e-4)
    assert mine.item() < 5.2


def test_gradients_may_be_taken_elsewhere_and_values_skipped() -> None:
    taken = []
    half, chip = on_chip(LlamaForCausalLM(LlamaConfig(**SHAPE)), lambda p, g: taken.append((p, g)) is None)
    loss_of(half, chip, torch.randint(0, 200, (1, SEQ + 1))).backward()
    assert all(p.grad is None for p in half.parameters())
    assert {id(p) for p, _ in taken} == {id(p) for p in half.parameters()}
    chip.account.reset()
    x = torch.randn(3, 8).half().requires_grad_()
    weight = torch.randn(5, 8).half()
    chip.linear(x, weight, value_needed=False).sum().backward()
    assert chip.account.operators.keys() == {"linear input gradient"}
    assert x.grad is not None


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(UserError, match="runs Llama-like layers"):
        install(nn.Linear(2, 2), Mt3000())
    with pytest.raises(UserError, match="backend mt3000 computes in FP16"):
        Mt3000().linear(torch.randn(2, 2), torch.randn(2, 2))
