"""Hosts made of network namespaces: they reach one another, at the rate asked for, and leave nothing."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from cluster import Cluster, ClusterUnavailable, unavailable

WORKER = str(Path(__file__).with_name("launch_worker.py"))

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(90),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

ALL_REDUCE = """
import json, os, time
from ratrain.runtime.rendezvous import connect
env = os.environ | {"RANK": os.environ["HOST_INDEX"], "WORLD_SIZE": os.environ["HOSTS"]}
rendezvous = connect(env, 60)
import torch, torch.distributed as dist
buffer = torch.full((1_000_000,), 1.0 + rendezvous.rank)
dist.all_reduce(buffer[:1000])
begun = time.monotonic()
dist.all_reduce(buffer)
elapsed = time.monotonic() - begun
dist.barrier()
dist.destroy_process_group()  # else its threads may abort the interpreter as it ends
print(json.dumps({"bytes": buffer.numel() * 4, "s": elapsed, "last": buffer[-1].item()}))
"""


@pytest.fixture
def two_hosts() -> Iterator[Cluster]:
    try:
        with Cluster(hosts=2, rate="50mbit") as cluster:
            yield cluster
    except ClusterUnavailable as reason:
        pytest.skip(str(reason))


def environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "RATRAIN_HEARTBEAT_TIMEOUT": "3"}


def ended(processes: list[psutil.Process]) -> bool:
    """Whether all end within 5 s; one that nobody has collected yet counts as ended."""
    left = psutil.wait_procs(processes, timeout=5)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def test_all_reduce_between_hosts_is_as_slow_as_the_link(two_hosts: Cluster) -> None:
    results = two_hosts.run([sys.executable, "-c", ALL_REDUCE], timeout=60, env=environment(), capture=True)
    for result in results:
        assert result.returncode == 0, result.stderr
        measured = json.loads(result.stdout)
        assert measured["last"] == 3.0
        # Two ranks: each sends the buffer once. Headers take 4 %; the full bucket at the start gives some.
        megabits = measured["bytes"] * 8 / measured["s"] / 1e6
        assert 35 < megabits < 56, measured


def test_stopped_rank_under_torchrun_on_two_hosts(two_hosts: Cluster) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command = [*torchrun, "--node-rank={host}", "--master-addr=10.77.0.1", WORKER, "loop"]
    agents = [
        two_hosts.start(host, command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for host in range(2)
    ]
    workers = []
    for agent in agents:
        assert agent.stdout is not None
        match = re.match(r"pid \d+ (\d+)", line := agent.stdout.readline())
        assert match, (line, agent.communicate())
        workers.append(psutil.Process(int(match[1])))
    begun = time.monotonic()
    workers[1].suspend()
    ends = [agent.communicate(timeout=40) for agent in agents]
    assert time.monotonic() - begun < 30
    assert all(agent.returncode != 0 for agent in agents)
    said = [line for _, err in ends for line in err.splitlines() if line.startswith("ratrain: ")]
    assert len(said) == 1 and re.search(r"rank 1 .*has not answered for 3 s", said[0]), ends
    assert ended(workers)


def test_two_clusters_have_the_same_addresses_and_do_not_meet(two_hosts: Cluster) -> None:
    serve = (
        "import socket; s = socket.create_server(('10.77.0.1', 7000)); print('on', flush=True); s.accept()"
    )
    ask = "import socket; socket.create_connection(('10.77.0.1', 7000), timeout=5)"
    server = two_hosts.start(0, [sys.executable, "-c", serve], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "on\n"
    with Cluster(hosts=2) as other:
        refused = other.start(1, [sys.executable, "-c", ask], stderr=subprocess.PIPE)
        assert "refused" in refused.communicate(timeout=20)[1]
    assert two_hosts.start(1, [sys.executable, "-c", ask]).wait(20) == 0
    assert server.wait(20) == 0


def test_what_still_runs_at_the_end_is_killed() -> None:
    with Cluster(hosts=1) as cluster:
        script = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
        done = cluster.run(["sh", "-c", script], capture=True, timeout=20)
        escaped = psutil.Process(int(done[0].stdout))
    assert ended([escaped])


def test_command_line_and_kill() -> None:
    script = str(Path(__file__).parents[1] / "benchmarks" / "cluster.py")
    base = [sys.executable, script, "--hosts", "2", "--"]
    show = "echo $HOST_INDEX/$HOSTS $MASTER_ADDR {host}; exit {host}"
    done = subprocess.run([*base, "sh", "-c", show], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["0/2 10.77.0.1 0", "1/2 10.77.0.1 1"]

    running = subprocess.Popen(
        [*base, "sh", "-c", "echo $$; exec sleep 1000"], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    pids = [int(running.stdout.readline()) for _ in range(2)]
    left = [*map(psutil.Process, pids), *psutil.Process(running.pid).children(recursive=True)]
    running.send_signal(signal.SIGKILL)
    running.wait(10)
    assert ended(left)


def test_a_rate_that_is_none_is_refused() -> None:
    with pytest.raises(ClusterUnavailable, match="450mbit"), Cluster(hosts=1, rate="fast"):
        pass
