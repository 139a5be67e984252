"""`ratrain mt3000`: what it prints, and what it refuses."""

import argparse
import json
from pathlib import Path

import pytest

from ratrain.errors import UserError
from ratrain.machine.mt3000.command import register, run


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser)
    return run(parser.parse_args(arguments))


def test_gemm_in_words_and_in_json(capsys, tmp_path: Path) -> None:
    picture = tmp_path / "roofline.png"
    assert command("gemm", "8192", "4096", "4096", "--roofline", str(picture)) == 0
    text = capsys.readouterr().out
    assert "70.2 % of peak" in text
    assert "bound by compute" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    options = [
        "--platform",
        "ft_m7032",
        "--dtype",
        "fp64",
        "--cores",
        "8",
        "--tiles",
        "mg=144,KG=512",
        "--json",
    ]
    assert command("gemm", "144", "12288", "4096", *options) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"percent_of_peak", "gflops", "seconds", "bound", "tiles", "bytes"} <= said.keys()
    assert said["percent_of_peak"] == pytest.approx(56.7, abs=5)
    assert said["tiles"]["MG"] == 144
    assert said["bound"] == "DDR"
    assert said["bytes"]["ddr"] == sum(
        size for path, size in said["bytes"].items() if "ddr>" in path or ">ddr" in path
    )


def test_attention_kernel_and_schedule(capsys) -> None:
    assert command("attention", "512", "--heads", "8", "--kv-heads", "2", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["backward"]["seconds"] > said["forward"]["seconds"] > 0
    assert command("kernel", "6", "48", "512", "--platform", "ft_m7032", "--dtype", "fp64", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cycles"] == 6 * 512 + 26
    assert command("gemm", "64", "64", "64", "--trans", "nt", "--schedule") == 0
    assert "transpose(src=B_in, dst=B_am)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemm", "8", "8", "0"], "K is 0"),
        (["gemm", "8", "8", "8", "--tiles", "MG"], "expected sizes such as"),
        (["gemm", "8", "8", "8", "--tiles", "QQ=3"], "tile QQ=3"),
        (["gemm", "8", "8", "8", "--platform", "nowhere.toml"], "no such chip or file"),
        (["gemm", "8", "8", "8", "--roofline", "/nonexistent/x.png"], "cannot write the picture"),
        (["attention", "8", "--heads", "6", "--kv-heads", "4"], "must be a multiple"),
        (["attention", "8", "--batch", "0"], "batch is 0"),
        (["kernel", "0", "8", "8"], "at least 1"),
    ],
)
def test_bad_requests(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        command(*arguments)
    assert "\n" not in str(caught.value)
