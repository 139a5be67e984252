"""Every command as a person or a script calls it: both ways in, tables and JSON, fast and without torch."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ratrain.cli import COMMANDS, main
from ratrain.program.passes import PASSES
from run_samples import environment, write_corpus, write_model, write_run

CONSOLE = [str(Path(sys.executable).parent / "ratrain")]
MODULE = [sys.executable, "-m", "ratrain"]


def shell(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=60, env=environment()
    )


def cpu_seconds(*command: str | Path) -> float:
    """Processor time of a command, the least of three: others share this machine."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert shell(*command).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS], ["data", "prepare"]])
def test_help_both_ways_in(command: list[str]) -> None:
    by_script, by_module = (shell(*way, *command, "--help") for way in (CONSOLE, MODULE))
    assert by_script.returncode == by_module.returncode == 0, by_script.stderr + by_module.stderr
    assert by_script.stdout == by_module.stdout and "usage: ratrain" in by_script.stdout


@pytest.mark.parametrize("way", [CONSOLE, MODULE])
def test_errors_both_ways_in(way: list[str]) -> None:
    for arguments in (["train", "/none.toml"], ["plan", "/none.toml"], ["check", "/none.toml"], ["fly"], []):
        done = shell(*way, *arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("ratrain: ") and done.stderr.count("\n") == 1, done.stderr


def test_help_and_planning_are_quick(tmp_path: Path) -> None:
    toml = write_run(tmp_path)
    assert cpu_seconds(*MODULE, "--help") < 0.3
    assert cpu_seconds(*MODULE, "plan", "--help") < 0.3
    assert cpu_seconds(*MODULE, "plan", toml) < 2.0  # half of it loads the compiled simulator


def test_only_workers_and_export_import_torch(tmp_path: Path) -> None:
    toml = write_run(tmp_path)
    script = f"""
import sys
import ratrain.runtime.launch as launch
launch.launch = lambda *rest, **more: 0
from ratrain.cli import main
from ratrain.program.passes import PASSES
for arguments in (["check", {str(toml)!r}],
                  ["data", "prepare", {str(tmp_path / "corpus")!r}, "--out", {str(tmp_path / "cache")!r}],
                  ["train", {str(toml)!r}], ["plan", {str(toml)!r}]):
    assert main(arguments) == 0, arguments
    heavy = {{"torch", "transformers", "numba", "matplotlib", "plotly", "tensorboard"}} & set(sys.modules)
    if arguments[0] in ("plan", "train"):
        heavy.discard("numba")  # the simulator's
    assert not heavy, (arguments, heavy)
"""
    done = shell(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


def output(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_plan_prints_a_table_json_and_a_file_that_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_run(tmp_path)
    table = output(capsys, "plan", toml, "--out", tmp_path / "plan.json")
    assert table.startswith("2 stages x 2 replicas, ZeRO-1, micro-batch 2 x 2")
    assert "activations" in table and "of budget" in table
    told = json.loads(output(capsys, "plan", toml, "--json"))["plan"]
    assert told == json.loads((tmp_path / "plan.json").read_text())
    assert told["layers"] == [2, 2] and told["budget"] == 2_000_000_000


def test_recipes_are_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = write_run(tmp_path)
    plans = {}
    for name in ("baseline-1f1b", "paper"):
        plans[name] = json.loads(output(capsys, "plan", toml, "--recipe", name, "--json"))["plan"]
        assert f"the recipe {name}" in plans[name]["why"]
    assert plans["baseline-1f1b"]["passes"] == [] and len(plans["paper"]["passes"]) == len(PASSES)
    page = tmp_path / "page.html"
    step = {
        name: json.loads(output(capsys, "simulate", toml, "--recipe", name, "--out", page, "--json"))[
            "step_s"
        ]
        for name in plans
    }
    assert step["paper"] < step["baseline-1f1b"]


def test_a_recipe_that_does_not_fit_is_told_in_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml, path = write_run(tmp_path), tmp_path / "plan.json"
    small = ["--set", "machine.memory=1 MB", "--out", str(path)]
    assert main(["plan", str(toml), "--recipe", "full-save", *small]) == 1
    said = capsys.readouterr().out
    assert "the recipe full-save does not fit" in said and "of 1.00 MB; " in said and "states" in said
    assert not path.exists()


def test_check_prints_a_grid_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = write_run(tmp_path, train__global_batch=16)
    grid = output(capsys, "check", toml)
    assert "stage 0 | " in grid and "stage 1 | " in grid and " F3 " in grid and "legal: " in grid
    told = json.loads(output(capsys, "check", toml, "--json"))
    assert told["legal"] is True and [s["in_flight"] for s in told["stages"]] == [2, 1]
    assert all(s["peak_bytes"] < 2_000_000_000 for s in told["stages"])


def test_no_layer_is_lost_where_stages_do_not_divide_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "deep", num_hidden_layers=30)
    toml = write_run(tmp_path, model__config=str(tmp_path / "deep"), parallel__pipeline=4, parallel__data=1)
    told = json.loads(output(capsys, "plan", toml, "--json"))["plan"]
    assert len(told["layers"]) == 4 and sum(told["layers"]) == 30
    assert [len(rungs) for rungs in told["rungs"]] == [
        n + (s in (0, 3)) for s, n in enumerate(told["layers"])
    ]


def test_data_prepare_says_what_it_made_and_finds_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / "blank.txt").write_text("\n")
    prepare = ("data", "prepare", corpus, "--vocab", "300", "--out", tmp_path / "cache")
    first = json.loads(output(capsys, *prepare, "--json"))
    assert first["reused"] is False and first["skips"] == {"empty": 1} and first["vocab_size"] <= 300
    assert first["train_documents"] + first["validation_documents"] == 30
    again = json.loads(output(capsys, *prepare, "--json"))
    assert again == first | {"reused": True}
    assert "(already there)" in output(capsys, *prepare)
    (corpus / "blank.txt").write_text("no longer blank\n")
    assert json.loads(output(capsys, *prepare, "--json"))["folder"] != first["folder"]
    # What it made is a corpus.
    toml = write_run(tmp_path, data__corpus=first["folder"])
    assert main(["plan", str(toml)]) == 0


def test_every_field_of_a_run_file_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = output(capsys, "train", "--help-config")
    assert "train.global_batch" in listed and "sequences per update" in listed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "no RUN.toml given; see examples/tiny.toml"),
        (["plan", "RUN", "--devices", "-4"], "'-4' is no whole number of at least 1"),
        (["plan", "RUN", "--devices", "3"], "are 4 processes, but there are 3"),
        (["plan", "RUN", "--out", "/nowhere/plan.json"], "cannot write plan /nowhere/plan.json"),
        (["plan", "RUN", "--recipe", "best"], "no recipe 'best'; expected one of tp-heavy, "),
        (["train", "RUN", "--recipe", "paper", "--plan", "x.json"], "--recipe and --plan"),
        (["train", "RUN", "--recipe", "paper", "--passes", "none"], "--passes and --recipe"),
        (["simulate", "RUN", "--recipe", "full-save", "--set", "machine.memory=1 MB"], "needs "),
        (["check", "RUN", "--columns", "0"], "'0' is no whole number"),
        (["data"], "the following arguments are required: prepare; see ratrain data --help"),
        (["data", "prepare", "/nowhere"], "corpus /nowhere does not exist"),
        (["data", "prepare", "CORPUS", "--vocab", "5", "--out", "HERE"], "vocabulary size 5 is too small"),
        (["export", "/nowhere", "HERE/out"], "/nowhere: not a checkpoint (no manifest.json)"),
        (["report", "/nowhere"], "/nowhere: no such folder"),
        (["report", "HERE"], "not a run folder (no metrics.jsonl)"),
        (["trian", "RUN"], "invalid choice: 'trian' (choose from 'train', 'plan'"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_run(tmp_path)
    names = {"RUN": str(toml), "CORPUS": str(tmp_path / "corpus"), "HERE": str(tmp_path)}
    filled = [names.get(a, a.replace("HERE", str(tmp_path))) for a in arguments]
    before = sorted(tmp_path.rglob("*"))
    try:
        status = main(filled)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and said in err and err.count("\n") == 1, err
    assert sorted(tmp_path.rglob("*")) == before


def test_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/none.toml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(["--debug", "plan", "/none.toml"]) == 2
    assert "Traceback" in capsys.readouterr().err
