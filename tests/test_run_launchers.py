"""The same run under torchrun, and on two hosts made of network namespaces."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_samples import Ratrain, Trained, column, environment, own_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from cluster import Cluster, ClusterUnavailable, unavailable

pytestmark = pytest.mark.timeout(280)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def alike(one: Path, other: Path) -> None:
    """Losses, norms and evaluations, bit for bit; and the whole run folder is there."""
    for key in ("loss", "grad_norm", "eval_loss"):
        assert column(one, key) == column(other, key), key
    assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}


def test_torchrun_is_the_same_as_ratrain_train(trained: Trained, tmp_path: Path) -> None:
    command = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "ratrain",
        "train",
        str(trained.toml),
    ]
    run = Ratrain(command=[*command, "--out", str(tmp_path / "run")])
    status, said, err = run.end(240)
    assert status == 0, err
    alike(trained.run, tmp_path / "run")
    assert said.count("\nreport ") == 1 and said.count("plan P=2 D=2") == 1


@pytest.mark.parametrize(
    ("nproc", "setting", "said"),
    [
        (4, "train.global_bach=1", "unknown key train.global_bach; did you mean train.global_batch?"),
        (3, "train.lr=0.1", "are 4 processes, but there are 3"),
    ],
)
def test_bad_input_under_torchrun_is_one_line(
    trained: Trained, tmp_path: Path, nproc: int, setting: str, said: str
) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(nproc), "-m", "ratrain", "train"]
    options = ["--set", setting, "--out", str(tmp_path / "run")]
    run = Ratrain(command=[*command, str(trained.toml), *options])
    status, _, err = run.end(120)
    lines = own_lines(err)
    assert status != 0 and len(lines) == 1 and said in lines[0], err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def two_hosts() -> Iterator[Cluster]:
    try:
        with Cluster(hosts=2) as cluster:
            yield cluster
    except ClusterUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.root
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_two_hosts_are_the_same_as_one(two_hosts: Cluster, trained: Trained, tmp_path: Path) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--node-rank={host}", "--master-addr=10.77.0.1"]
    command = [*agent, "-m", "ratrain", "train", str(trained.toml), "--out", str(tmp_path / "run")]
    done = two_hosts.run(command, timeout=240, env=environment(), capture=True)
    assert [host.returncode for host in done] == [0, 0], [host.stderr for host in done]
    alike(trained.run, tmp_path / "run")


@pytest.mark.root
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_hosts_that_do_not_share_the_run_folder_are_refused(
    two_hosts: Cluster, trained: Trained, tmp_path: Path
) -> None:
    """Ranks from environment variables alone. The second host sees another disk at run.out."""
    out = tmp_path / "out"
    out.mkdir()
    options = "--set parallel.pipeline=1 --set train.checkpoint_every=0"
    train = f"exec {sys.executable} -m ratrain train {trained.toml} --out {out}/run {options}"
    ranked = f"export RANK=$HOST_INDEX WORLD_SIZE=2 LOCAL_RANK=0; {train}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("private mounts are not allowed here")
    private = f"[ $HOST_INDEX = 0 ] || mount -t tmpfs tmpfs {out} || exit 99; {ranked}"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", private]
    done = two_hosts.run(command, timeout=120, env=environment(), capture=True)
    assert all(host.returncode not in (0, 99) for host in done), done
    lines = [line for host in done for line in own_lines(host.stderr)]
    assert (
        len(lines) == 1
        and "rank 1" in lines[0]
        and "set run.out to a directory that all hosts share" in lines[0]
    )
    assert not list(out.rglob("step-*")) and "step 1/" not in done[0].stdout
