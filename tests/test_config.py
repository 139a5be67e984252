"""RUN.toml: what it may say, and what is said when it says something else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.config import Config, describe, format_bytes, load_config, parse_bytes, parse_config, to_toml
from ratrain.errors import UserError

NEEDED = {"model": {"config": "m"}, "data": {"corpus": "c"}}


def built(*overrides: str, path: Path) -> Config:
    path.write_text("[model]\nconfig = 'm'\n[data]\ncorpus = 'c'\n")
    return load_config(path, overrides)


def test_everything_but_model_and_corpus_has_a_default() -> None:
    config = parse_config(NEEDED, "run.toml")
    assert config.train.clip == 1.0 and config.precision.view == "fp32" and config.parallel.zero == "auto"
    for missing in ("model", "data"):
        with pytest.raises(UserError, match=rf"run.toml: {missing}\.\w+ is missing; expected: "):
            parse_config({k: v for k, v in NEEDED.items() if k != missing}, "run.toml")


def test_every_field_is_documented_and_the_promised_names_exist() -> None:
    rows = {name: text for name, _, text in describe()}
    assert all(rows.values())
    promised = {
        "model": "config weights",
        "data": "corpus validation tokenizer seq_len",
        "train": "steps global_batch micro_batch lr clip seed checkpoint_every",
        "eval": "every batches",
        "precision": "view grad reduce",
        "parallel": "pipeline data tensor zero layers",
        "recovery": "policy ahead",
        "machine": "platform devices memory",
        "run": "backend",
    }
    for section, names in promised.items():
        assert {f"{section}.{name}" for name in names.split()} <= rows.keys()
    assert all(default == '"auto"' for name, default, _ in describe() if name.startswith("parallel."))


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    corpus=texts,
    lr=st.floats(0, 1e30),
    steps=st.integers(1, 10**12),
    layers=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    policy=st.sampled_from(["auto", "inputs", {"stage0": "keep", "layer3": "mlp"}]),
    passes=st.sampled_from(["all", "none", ["layerwise_sync"], []]),
)
def test_a_resolved_configuration_reads_back_equal(
    corpus: str, lr: float, steps: int, layers: list[int], policy: Any, passes: Any
) -> None:
    import tomllib

    table = {
        "model": {"config": "m"},
        "data": {"corpus": corpus},
        "train": {"lr": lr, "steps": steps},
        "parallel": {"layers": layers},
        "recovery": {"policy": policy},
        "run": {"passes": passes},
    }
    config = parse_config(table, "x")
    assert parse_config(tomllib.loads(to_toml(config)), "again") == config


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.global_bach=2", "unknown key train.global_bach; did you mean train.global_batch?"),
        ("trian.lr=2", "unknown key trian; did you mean train?"),
        ("train.qqqq=2", "unknown key train.qqqq; known: steps, global_batch"),
        ("foo", "--set foo: expected section.name=value, e.g. --set train.steps=10"),
        ("=1", "expected section.name=value"),
        ("train.=1", "expected section.name=value"),
        ("a.b.c=1", "expected section.name=value"),
        ("train=1", "expected section.name=value"),
        ("train.lr=abc", "train.lr = 'abc': expected a number (peak learning rate)"),
        ("train.lr=", "train.lr = '': expected a number"),
        ("train.lr=-1", "train.lr = -1.0: expected at least 0"),
        ("train.lr=nan", "train.lr = nan: expected at least 0"),
        ("train.lr=inf", "train.lr = inf: expected at least 0"),
        ("train.lr=true", "train.lr = True: expected a number"),
        ("train.beta1=1", "train.beta1 = 1.0: expected at least 0 and less than 1"),
        ("train.beta2=-0.1", "train.beta2 = -0.1: expected at least 0 and less than 1"),
        ("train.eps=0", "train.eps = 0.0: expected more than 0"),
        ("train.clip=-1", "train.clip = -1.0: expected at least 0"),
        ("train.weight_decay=-1", "expected at least 0"),
        ("train.lr_min_ratio=7", "expected at least 0 and at most 1"),
        ("train.loss_scale=0", "expected more than 0"),
        ("train.steps=0", "train.steps = 0: expected at least 1"),
        ("train.steps=1.5", "train.steps = 1.5: expected a whole number"),
        ("train.steps=true", "train.steps = True: expected a whole number"),
        ("train.micro_batch=auto2", "train.micro_batch = 'auto2': expected a whole number or 'auto'"),
        ("train.keep_checkpoints=0", "expected at least 1"),
        ("parallel.zero=4", "parallel.zero = 4: expected at least 0 and at most 3"),
        ("parallel.layers=[1, -1]", "parallel.layers = [1, -1]: expected whole numbers of at least 0"),
        ("parallel.layers=[true, 3]", "expected whole numbers of at least 0"),
        ("parallel.layers=even", "parallel.layers = 'even': expected a list or 'auto'"),
        ("precision.view=fp23", "expected one of fp32, bf16, fp16, fp64; did you mean fp32?"),
        ("recovery.policy=foo", "expected one of auto, keep, elementwise, mlp, inputs, or a table"),
        ("recovery.elide=perhaps", "expected true or false or 'auto'"),
        ("run.backend=torhc", "expected one of torch, emulated, mt3000; did you mean torch?"),
        ("run.out=''", "run.out is empty; expected: run folder"),
        ("data.corpus=''", "data.corpus is empty; expected: text file, folder"),
        ("machine.memory=2", "machine.memory = 2: expected a string (memory of one device with its unit"),
    ],
)
def test_what_is_refused_is_named_in_one_line(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        built(override, path=tmp_path / "run.toml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_overrides_are_toml_values_or_bare_words(tmp_path: Path) -> None:
    config = built(
        "train.lr=1e-4", "parallel.layers=[5, 3]", "run.out=somewhere/else", "recovery.policy={stage0='inputs'}",
        path=tmp_path / "run.toml",
    )  # fmt: skip
    assert config.train.lr == 1e-4 and config.parallel.layers == (5, 3)
    assert config.run.out == "somewhere/else" and config.recovery.policy == {"stage0": "inputs"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such run file"),
        (b"[model\n", "not valid TOML"),
        (b"\xff\xfe", "cannot be read as text"),
        (b"model = 3\n", "model must be a table"),
        (b"", "model.config is missing; expected: Hugging Face config.json"),
    ],
)
def test_a_file_that_is_no_run_file(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_need_their_unit() -> None:
    assert parse_bytes("20 GB", "x") == 20 * 10**9 and parse_bytes("1.5GiB", "x") == 3 * 2**29
    assert parse_bytes("512 B", "x") == 512 and parse_bytes(" 3 MiB ", "x") == 3 * 2**20
    for wrong in ("20", "GB", "-1 GB", "1,5 GB", "2 gb", "0 GB", "0.0 B", "nan GB", ""):
        with pytest.raises(UserError, match=r"machine\.memory = "):
            parse_bytes(wrong, "machine.memory")
    assert [format_bytes(n) for n in (999, 1500, 2e6, 19_570_000_000)] == [
        "999 B",
        "1.50 KB",
        "2.00 MB",
        "19.57 GB",
    ]


def test_values_are_frozen() -> None:
    config = parse_config(NEEDED, "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 1.0  # type: ignore[misc]
