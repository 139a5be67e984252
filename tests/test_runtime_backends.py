"""Device backends run the same program: the emulated chip computes the same curve, emulated devices take time."""

from __future__ import annotations

from pathlib import Path

from run_samples import Ratrain, column, metrics, write_model, write_run

PAPER_BOUND = 0.00081
"""Largest relative deviation of the loss that the paper reports for the chip."""


def trained(toml: Path, out: Path, *settings: str) -> list[float]:
    chosen = [word for setting in settings for word in ("--set", setting)]
    status, _, err = Ratrain("train", toml, "--out", out, "--resume", "never", *chosen).end()
    assert status == 0, err
    return column(out, "loss")


def test_the_chip_follows_torch(tmp_path: Path) -> None:
    toml = write_run(
        tmp_path,
        train__steps=3,
        train__global_batch=4,
        parallel__data=1,
        train__micro_batch=1,
        recovery__policy="inputs",
    )
    write_model(
        tmp_path / "model", hidden_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1
    )
    torch = trained(toml, tmp_path / "torch")
    chip = trained(toml, tmp_path / "chip", "run.backend=mt3000", "precision.view=fp16")
    assert len(chip) == 3 and chip != torch
    assert all(abs(a - b) / b < PAPER_BOUND for a, b in zip(chip, torch))
    updates = [entry for entry in metrics(tmp_path / "chip") if "loss" in entry]
    assert all(entry["chip_s"] > 0 and not entry["skipped"] for entry in updates[1:])


def test_emulated_devices_wait_and_send_for_real(tmp_path: Path) -> None:
    toml = write_run(tmp_path, train__steps=3, recovery__policy="inputs", parallel__zero=2)
    assert trained(toml, tmp_path / "out", "run.backend=emulated") == [0.0, 0.0, 0.0]
    updates = [entry for entry in metrics(tmp_path / "out") if "loss" in entry]
    assert all(entry["grad_norm"] == 0.0 and not entry["skipped"] for entry in updates)
    exposed = [entry["exposed_by_cause"] for entry in updates]
    assert any("RECV_GRAD" in causes for causes in exposed)
