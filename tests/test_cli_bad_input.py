"""What a newcomer can get wrong: one line that names it, no traceback, no worker, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratrain.cli import main
from run_samples import write_corpus, write_model, write_run


@dataclass(frozen=True)
class Bench:
    """A place with a run file, and what happened to commands run there."""

    folder: Path
    toml: Path
    capsys: pytest.CaptureFixture[str]
    launched: list[int]

    def call(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Exit status, standard output, standard error of one command."""
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # argparse
            assert isinstance(stopped.code, int)
            status = stopped.code
        return status, *self.capsys.readouterr()

    def train(self, *settings: str, options: tuple[str | Path, ...] = ()) -> tuple[int, str, str]:
        overrides = [part for setting in settings for part in ("--set", setting)]
        return self.call("train", self.toml, *overrides, *options)

    def refused(self, *settings: str, options: tuple[str | Path, ...] = ()) -> str:
        """The one line with which `ratrain train` refuses to begin."""
        before = sorted(self.folder.rglob("*"))
        status, out, err = self.train(*settings, options=options)
        assert (status, out) == (2, ""), (status, out, err)
        assert err.startswith("ratrain: ") and err.count("\n") == 1, err
        assert "internal error" not in err
        assert not self.launched
        assert sorted(self.folder.rglob("*")) == before, "something was left behind"
        return err

    def accepted(self, *settings: str, options: tuple[str | Path, ...] = ()) -> str:
        """What is announced before the workers start."""
        status, out, err = self.train(*settings, options=options)
        assert (status, err) == (0, ""), err
        assert self.launched
        return out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad-input")
    write_run(folder)
    assert (
        main(["data", "prepare", str(folder / "corpus"), "--vocab", "300", "--out", str(folder / "cache")])
        == 0
    )
    return folder


@pytest.fixture
def bench(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    launched: list[int] = []

    def launch(arguments: Any, nproc: int, **more: Any) -> int:
        launched.append(nproc)
        return 0

    monkeypatch.setattr("ratrain.runtime.launch.launch", launch)
    toml = write_run(tmp_path, data__cache=str(prepared / "cache"))
    return Bench(tmp_path, toml, capsys, launched)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_good_run_is_accepted_and_its_folder_is_whole(bench: Bench) -> None:
    assert "plan P=2 D=2 ZeRO-1, layers 2/2, micro-batch 2 x 2" in bench.accepted()
    assert bench.launched == [4]
    assert {p.name for p in (bench.folder / "run").iterdir()} == {
        "run.toml", "plan.json", "model.json", "setup.json", "forecast.json", "tokenizer",
    }  # fmt: skip


# --- corpus


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "none.txt does not exist; give a text file"),
        ("empty.txt", b"", "empty.txt holds no text"),
        ("blank.txt", b" \n\n", "holds no text (passed over: 1 empty)"),
        ("tiny.txt", b"a", "too few to hold some out for validation"),
        ("bad.txt", b"abc\ndef \xff\n", "bad.txt, line 2: byte 0xFF"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "b\xe6c"}\n', "bad.jsonl, line 2: byte 0xE6"),
        ("broken.jsonl", b'{"text": "a"}\n{"tex\n', "broken.jsonl, line 2: not valid JSON"),
        ("keyless.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "keyless.jsonl, line 2: "),
        ("fake.jsonl.gz", b"no gzip", "fake.jsonl.gz, line 1: the gzip data is cut short or damaged"),
    ],
)
def test_corpus(bench: Bench, name: str, content: bytes | None, said: str) -> None:
    path = bench.folder / name
    if content is not None:
        path.write_bytes(content)
    assert said in bench.refused(f"data.corpus={path}")


def test_corpus_folders_and_tokenizers(bench: Bench) -> None:
    (bench.folder / "void").mkdir()
    assert "void holds no text file; expected some of *.py" in bench.refused(
        f"data.corpus={bench.folder / 'void'}"
    )
    assert "/nowhere does not exist" in bench.refused("data.validation=/nowhere")
    assert "tokenizer /nowhere has no tokenizer.json" in bench.refused("data.tokenizer=/nowhere")
    damaged = written(bench.folder / "tokenizer.json", b"{")
    assert f"tokenizer {damaged} is damaged" in bench.refused(f"data.tokenizer={damaged}")


def test_bad_bytes_may_be_passed_over_and_are_counted(bench: Bench) -> None:
    write_corpus(bench.folder / "dirty")
    written(bench.folder / "dirty" / "bad.txt", b"abc \xff")
    said = bench.accepted(f"data.corpus={bench.folder / 'dirty'}", "data.skip_bad=true")
    assert "skipped documents: 1 undecodable" in said


def test_an_unreadable_corpus(bench: Bench) -> None:
    # A file that even root cannot read from its beginning.
    said = bench.refused("data.corpus=/proc/self/mem")
    assert "/proc/self/mem" in said and "Input/output error" in said


def test_token_ids_beyond_the_vocabulary(bench: Bench, prepared: Path) -> None:
    made = next((prepared / "cache").iterdir())
    small = write_model(bench.folder / "small", vocab_size=280)
    said = bench.refused(f"data.corpus={made}", f"model.config={small}")
    assert re.search(r"token id \d+ in .* is beyond the vocabulary of 280 \(ids 0 to 279\)", said)
    # The store is good, it is the model that is too small.
    bench.accepted(f"data.corpus={made}")


def test_a_tokenizer_larger_than_the_model(bench: Bench, prepared: Path) -> None:
    tokenizer = next((prepared / "cache").iterdir()) / "tokenizer"
    small = write_model(bench.folder / "small", vocab_size=260)
    said = bench.refused(f"data.tokenizer={tokenizer}", f"model.config={small}")
    assert "beyond the vocabulary of 260" in said


def test_a_damaged_token_store(bench: Bench, prepared: Path) -> None:
    import shutil

    made = shutil.copytree(next((prepared / "cache").iterdir()), bench.folder / "store")
    tokens = max((made / "train").iterdir(), key=lambda p: p.stat().st_size)
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    assert f"{made / 'train'} is corrupt" in bench.refused(f"data.corpus={made}")
    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert str(made / "train") in bench.refused(f"data.corpus={made}")


# --- model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture (GPT2LMHeadModel)",
        ),
        ({"num_attention_heads": 7}, "num_attention_heads 7 is not a multiple of num_key_value_heads 2"),
        ({"hidden_size": 33}, "hidden_size 33 is not a multiple of num_attention_heads 4"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a positive whole number"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
    ],
)
def test_model(bench: Bench, changes: dict[str, Any], said: str) -> None:
    model = write_model(bench.folder / "other", **changes)
    line = bench.refused(f"model.config={model}")
    assert said in line and str(model) in line


def test_a_model_that_is_not_there(bench: Bench) -> None:
    assert "/nowhere: no model configuration" in bench.refused("model.config=/nowhere")
    empty = bench.folder / "empty"
    empty.mkdir()
    assert f"{empty}/config.json: no model configuration" in bench.refused(f"model.config={empty}")
    written(empty / "config.json", b"{")
    assert "not a readable config.json" in bench.refused(f"model.config={empty}")
    written(empty / "config.json", b"[]")
    assert "holds a list; expected a JSON object" in bench.refused(f"model.config={empty}")


def test_seq_len_beyond_the_models_positions(bench: Bench) -> None:
    said = bench.refused("data.seq_len=129")
    assert "data.seq_len 129 is beyond the model's 128 positions" in said
    bench.accepted("data.seq_len=128")
    for command in ("plan", "check"):
        status, _, err = bench.call(command, bench.toml, "--set", "data.seq_len=129")
        assert status == 2 and err == said


def sharded_weights(folder: Path) -> Path:
    """A model folder with weights in two shards, without torch: zeros, in the safetensors format."""
    from ratrain.model.spec import load_spec

    write_model(folder)
    shapes = {name: list(p.shape) for name, p in load_spec(folder).all_parameters().items()}
    names = list(shapes)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file, at, header = f"model-{number:05}-of-00002.safetensors", 0, {}
        for name in part:
            size = 4 * int(np_prod(shapes[name]))
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        text = json.dumps(header).encode()
        written(folder / file, len(text).to_bytes(8, "little") + text + bytes(at))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def np_prod(shape: list[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def _list_a_tensor_that_is_not_there(index: Path) -> None:
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002.safetensors"),
        (lambda f: _cut(f / "model-00002-of-00002.safetensors", 5000), "model-00002-of-00002.safetensors"),
        (lambda f: _cut(f / "model-00001-of-00002.safetensors", 0), "model-00001-of-00002.safetensors"),
        (
            lambda f: _list_a_tensor_that_is_not_there(f / "model.safetensors.index.json"),
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (lambda f: written(f / "model.safetensors.index.json", b"{}"), "model.safetensors.index.json"),
        (lambda f: write_model(f, num_hidden_layers=5), "model.layers.4."),
        (lambda f: write_model(f, intermediate_size=96), "model.layers.0.mlp."),
    ],
)
def test_broken_weights_are_refused_before_launch(
    bench: Bench, damage: Callable[[Path], Any], named: str
) -> None:
    folder = sharded_weights(bench.folder / "weights")
    damage(folder)
    layout = ("parallel.layers=auto",)
    assert named in bench.refused(f"model.config={folder}", *layout)


def test_whole_weights_are_accepted_and_broken_ones_can_be_left_out(bench: Bench) -> None:
    folder = sharded_weights(bench.folder / "weights")
    bench.accepted(f"model.config={folder}")
    _cut(folder / "model-00001-of-00002.safetensors", 100)
    bench.accepted(f"model.config={folder}", "model.weights=none", "run.out=" + str(bench.folder / "fresh"))


# --- layout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["train.global_batch=9"],
            "train.global_batch 9 is not a multiple of 4 = parallel.data 2 x train.micro_batch 2",
        ),
        (["train.micro_batch=3"], "train.global_batch 8 is not a multiple of 6"),
        (
            ["parallel.layers=[1, 2]"],
            "parallel.layers [1, 2] adds up to 3, but the model has 4 decoder layers",
        ),
        (["parallel.layers=[4]"], "parallel.layers has 1 entries, but parallel.pipeline is 2"),
        (["parallel.layers=[2, 0, 2]", "parallel.pipeline=3"], "stage 1 would be empty"),
        (["parallel.pipeline=9"], "parallel.pipeline 9 is more than the model's 4 decoder layers"),
        (["parallel.tensor=3"], "parallel.tensor 3 does not divide the model's 4 attention heads"),
        (["machine.devices=3"], "are 4 processes, but there are 3"),
        (["recovery.policy={stage7='inputs'}"], "no block or stage 'stage7'"),
        (["recovery.policy={layer0='most'}"], "recovery.policy.layer0 = 'most': expected one of keep"),
        (["run.passes=[1]"], "run.passes: unknown pass 1"),
        (["machine.platform=moon"], "no platform 'moon'"),
        (["run.backend=mt3000"], "mt3000 computes in FP16, but precision.view = fp32; set it to fp16"),
        (["run.backend=emulated", "run.device=cuda"], "run.backend = emulated runs on run.device = cpu only"),
        (["train.global_bach=2"], "unknown key train.global_bach; did you mean train.global_batch?"),
    ],
)
def test_layout(bench: Bench, settings: list[str], said: str) -> None:
    assert said in bench.refused(*settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc", "3"], "are 4 processes, but there are 3"),
        (["--nproc", "0"], "argument --nproc: '0' is no whole number of at least 1"),
        (["--nproc", "two"], "argument --nproc: 'two' is no whole number"),
        (
            ["--passes", "foo"],
            "run.passes: unknown pass 'foo'; expected all, none, or grouped_ends, layerwise_sync",
        ),
        (["--passes", ""], "run.passes is empty"),
        (["--out", ""], "run.out is empty"),
        (["--port", "70000"], "port 70000 cannot be opened"),
        (["--resume", "/nowhere"], "/nowhere: not a checkpoint"),
        (["--plan", "/nowhere"], "plan /nowhere: No such file or directory; make one with ratrain plan"),
        (["--out", "/proc/run"], "run.out = /proc/run: cannot be written"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate; see ratrain --help"),
    ],
)
def test_options(bench: Bench, options: list[str], said: str) -> None:
    assert said in bench.refused(options=tuple(options))


def test_run_out_that_is_a_file(bench: Bench) -> None:
    file = written(bench.folder / "file", b"mine")
    assert f"run.out = {file}: cannot be written" in bench.refused(options=("--out", file))
    assert file.read_bytes() == b"mine"


def test_cuda_where_there_is_none(bench: Bench) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert "run.device = cuda: torch finds no CUDA device" in bench.refused("run.device=cuda")


def test_a_port_in_use(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} is in use by another process" in bench.refused(options=("--port", port))
    bench.accepted(options=("--port", port))


# --- memory


@pytest.mark.parametrize("seq_len", [16, 128])
def test_a_budget_that_cannot_hold(bench: Bench, seq_len: int) -> None:
    """The line names the rank and its need; what it calls the smallest is accepted, a step less is not."""
    fixed = (
        "recovery.policy=keep",
        "recovery.elide=true",
        f"data.seq_len={seq_len}",
        "parallel.layers=[3, 1]",
    )
    said = bench.refused("machine.memory=1 MB", *fixed)
    match = re.search(
        r"stage 0 \(rank 0\) needs [\d.]+ MB of 1.00 MB; .*smallest machine.memory that would hold it is "
        r"(\d+)\.(\d\d) MB",
        said,
    )
    assert match, said
    hundredths = int(match[1] + match[2])
    below = (hundredths - 1) / 100
    assert f"of {below:.2f} MB" in bench.refused(f"machine.memory={below:.2f} MB", *fixed)
    bench.accepted(f"machine.memory={hundredths / 100:.2f} MB", *fixed)


# --- a plan that is not of this run


def test_a_plan_binds_the_run(bench: Bench) -> None:
    plan = bench.folder / "plan.json"
    assert bench.call("plan", bench.toml, "--out", plan)[0] == 0
    bench.accepted(options=("--plan", plan, "--nproc", "4"))
    bench.launched.clear()
    (bench.folder / "run").rename(bench.folder / "elsewhere")
    for setting, name in (
        ("train.global_batch=16", "train.global_batch = 8, the run has 16"),
        ("data.seq_len=32", "data.seq_len = 16, the run has 32"),
        ("train.micro_batch=1", "train.micro_batch = 2, the run has 1"),
        ("parallel.zero=0", "parallel.zero = 1, the run has 0"),
        ("parallel.layers=[3,1]", "parallel.layers = (2, 2), the run has (3, 1)"),
        ("precision.view=bf16", "precision.view = fp32, the run has bf16"),
        ("train.clip=0", "clipping = on, the run has off"),
        ("machine.memory=1 GB", "machine.memory = 2000000000, the run has 1000000000"),
    ):
        assert f"{plan}: planned for {name}" in bench.refused(setting, options=("--plan", plan))
    assert "a plan for 4 processes, but 2 are to run" in bench.refused(
        options=("--plan", plan, "--nproc", "2")
    )
    assert "--passes and --plan" in bench.refused(options=("--plan", plan, "--passes", "none"))
    other = write_model(bench.folder / "other", num_hidden_layers=6)
    assert "the plan is of model" in bench.refused(f"model.config={other}", options=("--plan", plan))
    plan.write_text(plan.read_text()[:100])
    assert f"plan {plan} is not JSON" in bench.refused(options=("--plan", plan))


# --- no space left


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of `size` at `folder`; needs root and the right to mount."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_no_space_left_for_the_data(bench: Bench) -> None:
    with small_disk(bench.folder / "disk", "16k") as disk:
        said = bench.refused(f"data.cache={disk}")
        assert "no space left to write" in said
        assert list(disk.iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_no_space_left_for_the_run_folder(bench: Bench) -> None:
    with small_disk(bench.folder / "disk", "16k") as disk:
        said = bench.refused(f"run.out={disk / 'run'}")
        assert "No space left on device" in said or "no space left" in said
        assert list(disk.iterdir()) == []


def test_a_run_folder_that_cannot_be_written_whole_keeps_what_was_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.accepted()
    bench.launched.clear()
    before = {p: p.read_bytes() for p in (bench.folder / "run").rglob("*") if p.is_file()}

    def full(self: Path, *rest: Any, **more: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device" in bench.refused("train.lr=1e-4")
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in (bench.folder / "run").rglob("*") if p.is_file()} == before
