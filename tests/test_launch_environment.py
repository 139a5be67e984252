"""What launchers put into the environment, and ports; no torch."""

import socket

import pytest

from ratrain.errors import UserError
from ratrain.runtime.rendezvous import connect, first_host, listen, place_from


def test_started_by_hand_is_no_place() -> None:
    assert place_from({}) is None
    assert place_from({"MASTER_PORT": "29500"}) is None


def test_torchrun() -> None:
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "a",
    }
    place = place_from(env)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
    assert (place.master_addr, place.master_port, place.agent_store) == ("node1", 29400, True)


def test_slurm_ranks_derive_one_port_and_job() -> None:
    common = {
        "SLURM_NTASKS": "4",
        "SLURM_NODELIST": "cn[07-09,12]",
        "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0",
    }
    places = [
        place_from(common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}) for rank in range(4)
    ]
    assert [place and (place.rank, place.local_rank, place.world_size) for place in places] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]
    assert {place and (place.master_addr, place.master_port) for place in places} == {
        ("cn07", places[0] and places[0].master_port)
    }
    other = place_from(common | {"SLURM_PROCID": "0", "SLURM_JOB_ID": "10"})
    assert other is not None and places[0] is not None and other.job != places[0].job


def test_a_slurm_batch_script_and_a_single_task_are_by_hand() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "cn1", "ENVIRONMENT": "BATCH"}
    assert place_from(batch) is None
    assert place_from(batch | {"SLURM_STEP_NUM_TASKS": "4"}) is not None
    assert place_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("cn7", "cn7"),
        ("cn07,cn08", "cn07"),
        ("cn[07-09,12]", "cn07"),
        ("cn[3,5]-ib,login1", "cn3-ib"),
        ("rack[1-2]node[01-16]", "rack1node01"),
        ("a-b.c,d", "a-b.c"),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_open_mpi_on_one_host_and_on_several() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "prterun-1@1",
    }
    place = place_from(env)
    assert place is not None and (place.rank, place.local_rank, place.master_addr) == (3, 3, "127.0.0.1")
    with pytest.raises(UserError, match="MASTER_ADDR"):
        place_from(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    place = place_from(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "4000"})
    assert place is not None and (place.master_addr, place.master_port) == ("h", 4000)


def test_nonsense_from_a_launcher_names_the_variable() -> None:
    with pytest.raises(UserError, match=r"RANK is 'x'"):
        place_from({"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
    with pytest.raises(UserError, match="MASTER_PORT is None"):
        place_from({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("owner", ["127.0.0.1", ""])
@pytest.mark.parametrize("asker", ["127.0.0.1", ""])
def test_a_port_in_use_is_named(owner: str, asker: str) -> None:
    with listen(owner, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port} is in use") as caught:
            listen(asker, port)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="port 70000"):
        listen(asker, 70000)


def test_rank_0_of_another_launcher_names_the_port_in_use() -> None:
    with listen("", 0) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UserError, match=f"^port {port} is in use"):
            connect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}, timeout=5)


def test_absent_ranks_are_named() -> None:
    with listen("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": port, "RATRAIN_STORE_FD": str(free.detach())}
    with pytest.raises(UserError, match=r"^2 of 3 ranks did not come .* within 0\.5 s \(rank 1, 2\)"):
        connect(env, timeout=0.5)


def test_an_unreachable_rank_0_is_one_line() -> None:
    with listen("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    with pytest.raises(UserError, match=f"rank 0 does not answer at 127.0.0.1 port {port}") as caught:
        connect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}, timeout=1)
    assert "\n" not in str(caught.value)


def test_a_free_port_accepts_connections() -> None:
    with listen("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname()[:2], timeout=5).close()
