import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dynatrain.cluster.board import Board
from dynatrain.cluster.causes import first_cause, say_end
from dynatrain.cluster.context import Report
from dynatrain.cluster.door import Door
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.meeting import Job, Meeting, contexts, meet
from dynatrain.cluster.place import Place, PlaceError, choose_device, place_from, share, wait_for_listener
from dynatrain.cluster.store import host_store
from dynatrain.cluster.summons import Newcomer
from dynatrain.cluster.tenure import Tenure
from dynatrain.observe.run import RunFolder

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_WORLD_SIZE": "1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def place(node: int, nodes: int) -> Place:
    return Place(node=node, nodes=nodes, host="h", port=1, nonce="s")


def test_alone_the_agent_hosts_its_store_and_under_torchrun_it_never_does() -> None:
    alone, again = place_from({"RANK": "3", "WORLD_SIZE": "8"}), place_from({})
    assert alone.hosts_store
    assert (alone.node, alone.nodes) == (0, 1)
    assert alone.nonce != again.nonce
    joined = place_from(TORCHRUN)
    assert not joined.hosts_store
    assert (joined.node, joined.nodes, joined.host, joined.port) == (1, 2, "10.0.0.1", 29500)
    assert joined.nonce != place_from({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).nonce


def test_a_launch_that_cannot_work_is_refused_with_all_its_problems() -> None:
    with pytest.raises(PlaceError, match=r"--nproc-per-node=4.*use --nproc-per-node=1.*does not share its store"):
        place_from({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "False"})


@pytest.mark.parametrize(("world", "nodes"), [(4, 1), (4, 2), (6, 3), (3, 3)])
def test_the_nodes_shares_are_equal_and_cover_every_rank_once(world, nodes) -> None:
    shares = [share(world, place(node, nodes)) for node in range(nodes)]
    assert [rank for ranks in shares for rank in ranks] == list(range(world))
    assert {len(ranks) for ranks in shares} == {world // nodes}


@pytest.mark.parametrize(
    ("world", "nodes", "nearest"),
    [(2, 3, "3 ranks; or 2 nodes"), (5, 2, "4 ranks or 6 ranks; or 1 node"), (0, 1, "1 ranks; or 1 node")],
)
def test_ranks_that_cannot_be_shared_out_equally_are_refused_with_what_can(world, nodes, nearest) -> None:
    with pytest.raises(PlaceError, match=rf"{world} ranks on {nodes} nodes.*equally many.*Nearest: {nearest}\."):
        share(world, place(0, nodes))


@pytest.mark.parametrize(("nodes", "told"), [(1, None), (2, 2)])
def test_ranks_are_told_how_many_share_their_node(tmp_path, nodes, told) -> None:
    job = Job(
        run=RunFolder(tmp_path),
        attempt=0,
        place=place(nodes - 1, nodes),
        world_size=4,
        layout="dp4",
        resize=lambda *_: "",
        device="cpu",
        liveness_seconds=1.0,
        grace_seconds=0.0,
        leave_seconds=1.0,
        drain_seconds=1.0,
        announce=print,
        tenure=Tenure(RunFolder(tmp_path)),
    )
    store = host_store()
    meeting = Meeting(
        store=store,
        run=store,
        board=Board(store, 4),
        world_size=4,
        devices=dict.fromkeys(range(nodes), 0),
        device="cpu",
        backend="gloo",
        realtime=False,
        attempt=0,
        note="",
        seats=tuple(Newcomer(member=rank, node=rank * nodes // 4, slot=0) for rank in range(4)),
        each=4 // nodes,
    )
    found = contexts(job, meeting, meeting.seats, range(4))
    assert [one.rank for one in found] == list(range(4))[-4 // nodes :]
    assert {one.ranks_per_node for one in found} == {told}


def test_cuda_is_chosen_only_where_every_rank_of_every_node_has_a_device() -> None:
    assert choose_device("auto", {0: (4, 4), 1: (8, 4)}) == ("cuda", "")
    assert choose_device("auto", {0: (0, 4)}) == ("cpu", "")
    assert choose_device("cpu", {0: (4, 4)}) == ("cpu", "")
    device, note = choose_device("auto", {0: (4, 4), 1: (0, 4)})
    assert (device, "node 1 has 0 for 4" in note) == ("cpu", True)
    with pytest.raises(PlaceError, match=r"node 0 has 1 for 4.*Nearest"):
        choose_device("cuda", {0: (1, 4)})


def test_an_address_where_nobody_listens_is_told_in_the_time_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wait_for_listener("127.0.0.1", port, 1.0, lambda _: None)
    with pytest.raises(PlaceError, match=rf"Nobody listens at 127\.0\.0\.1:{port} after 0\.1 s"):
        wait_for_listener("127.0.0.1", port, 0.1, lambda _: None)


def test_the_first_cause_is_who_died_without_words_and_else_who_spoke_first() -> None:
    early = Report(kind="ended", member=2, code=1, words="ValueError: planted", spoken=1.0)
    late = Report(kind="ended", member=0, code=1, words="RuntimeError: Connection closed by peer", spoken=1.01)
    killed = Report(kind="ended", member=3, signal=9)
    left = Report(kind="ended", member=3, code=7)
    assert first_cause([late, early]) == early
    assert first_cause([late, early, killed]) == killed
    assert [say_end(end) for end in (early, killed, left)] == [
        "raised ValueError: planted",
        "was killed by SIGKILL",
        "ended with code 7",
    ]


def job_of(tmp_path, store, node: int, size: int = 4, **about) -> Job:
    """One of two agents at a store of 127.0.0.1."""
    return Job(
        run=RunFolder(tmp_path),
        attempt=node,
        place=Place(node=node, nodes=2, host="127.0.0.1", port=store.port, nonce="s"),
        world_size=size,
        layout="",
        resize=lambda *_: "",
        device="cpu",
        liveness_seconds=1.0,
        grace_seconds=0.0,
        leave_seconds=1.0,
        drain_seconds=1.0,
        announce=print,
        tenure=Tenure(RunFolder(tmp_path)),
        **about,
    )


def test_all_agents_take_the_number_of_ranks_from_node_0(tmp_path) -> None:
    store = host_store()
    jobs = [job_of(tmp_path, store, node, size) for node, size in enumerate((8, 4))]
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda job: meet(job, Interrupts()), jobs))
    assert [(one.world_size, one.attempt) for one in met] == [(8, 0), (8, 0)]
    members = [[one.member for one in contexts(*both, both[1].seats, range(8))] for both in zip(jobs, met, strict=True)]
    assert members == [[0, 1, 2, 3], [4, 5, 6, 7]]
    other = replace(jobs[1], prints={"code": "x"})  # a second agent as node 1
    with pytest.raises(PlaceError, match=r"the place of node 1 is taken by process \d+ on .*one agent"):
        meet(other, Interrupts())
    assert "the place of node 1 is taken" in Door(store, "").look()


def test_agents_that_are_not_alike_do_not_begin_and_each_says_why(tmp_path) -> None:
    store = host_store()

    def refused(node: int) -> str:
        with pytest.raises(PlaceError) as error:
            meet(job_of(tmp_path, store, node, prints={"code": f"c{node}", "torch": "2"}), Interrupts())
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(refused, range(2)):
            assert "node 1 has another code (c1) than node 0 (c0)" in said
            assert "torch" not in said
