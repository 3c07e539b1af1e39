"""Spares: where they are started, who is called, and that they are neither lost nor ended too early."""

import json

import pytest
from tests.clusters import Cluster
from tests.unit.test_parting import told

from dynatrain.cluster.membership import next_world
from dynatrain.cluster.peers import Status
from dynatrain.cluster.reserve import TRIES, chosen
from dynatrain.cluster.summons import Newcomer


def at(member: int, node: int, slot: int = 0) -> Newcomer:
    return Newcomer(member=member, node=node, slot=slot)


def test_spares_are_dealt_out_over_the_nodes_as_far_as_there_are_places() -> None:
    assert chosen(3, (), {0: [4, 5], 1: [7]}, 9) == (at(9, 1, 7), at(10, 0, 4), at(11, 0, 5))
    assert chosen(2, (at(3, 1),), {0: [4], 1: [7]}, 9) == (at(9, 0, 4), at(10, 1, 7))
    assert chosen(2, (), {0: [], 1: [7]}, 9) == (at(9, 1, 7),)
    assert chosen(0, (), {0: [1]}, 9) == ()


def test_newcomers_are_spares_first_and_then_go_where_the_fewest_are() -> None:
    found = next_world((0, 1), {0: 0, 1: 1}, size=5, leave=(), free={0: 4, 1: 4}, first=9, ready={1: [5, 6]})
    assert dict(found.newcomers) == {5: 1, 6: 1, 9: 0}
    assert found.new == (0, 9, 1, 5, 6)


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    """Two nodes with a rank each, and one spare that is ready on node 1."""
    made = Cluster(tmp_path, spares=1)
    made.tick()
    made.alive(2)
    made.beat(0, 1, 2)
    made.tick()
    return made


def forked(cluster: Cluster, node: int) -> list[tuple[int, int, bool]]:
    return [(c.member, c.local_rank, c.spare) for c in cluster.nodes[node].spawner.forked[1:]]


def call_of(cluster: Cluster, member: int) -> dict:
    return json.loads(cluster.board.peek(f"call/{member}") or "{}")


def test_a_spare_is_forked_once_and_called_to_the_next_world_with_its_place(cluster) -> None:
    assert (forked(cluster, 0), forked(cluster, 1)) == ([], [(2, 1, True)])
    cluster.ask("a", size=3)
    cluster.tick()
    assert cluster.asked()["arguments"]["members"] == [0, 1, 2]
    called = call_of(cluster, 2)
    assert (called["rank"], called["world_size"], called["generation"], called["local_rank"]) == (2, 3, 1, 1)
    assert (called["joins"], called["spare"]) == (True, False)
    cluster.reply("done")
    cluster.tick()
    assert cluster.answer("a").outcome == "done"
    assert cluster.nodes[1].spawner.killed == []
    assert (forked(cluster, 0), forked(cluster, 1)) == ([], [(2, 1, True), (3, 2, True)])  # and there is one again
    cluster.ask("b", size=2)
    cluster.tick()
    cluster.asked()
    cluster.reply("done")
    assert cluster.nodes[1].spawner.killed == []  # who was a spare has the same time to end as any leaver


def test_a_spare_that_has_not_beaten_is_not_waited_for(tmp_path) -> None:
    cluster = Cluster(tmp_path, spares=1)
    cluster.tick()
    cluster.ask("a", size=3)
    cluster.tick()
    assert [member for member, *_ in forked(cluster, 0)] == [3]
    assert call_of(cluster, 2) == {}
    assert cluster.nodes[1].spawner.killed == []


def test_who_leaves_with_its_host_is_replaced_by_a_spare_elsewhere(tmp_path) -> None:
    cluster = Cluster(tmp_path, nodes=3, spares=1)
    cluster.tick()
    assert forked(cluster, 2) == [(3, 1, True)]
    cluster.alive(3)
    cluster.beat(0, 1, 2, 3)
    cluster.tick()
    told(cluster, 1)
    assert cluster.asked()["arguments"]["members"] == [0, 2, 3]


def test_a_spare_goes_with_its_host_and_another_host_gets_one(cluster) -> None:
    cluster.beat(0, 1, 2)
    told(cluster, 1)
    assert cluster.nodes[1].spawner.killed == [2]
    assert cluster.asked()["arguments"]["members"] == [0]
    cluster.end(1)
    cluster.reply("done")
    cluster.tick()
    cluster.end(2, signal=9)
    cluster.nodes[1].peers.say(Status(state="left"))
    cluster.nodes[1].state = "left"
    cluster.tick()
    cluster.tick()
    assert cluster.answer("a") is None
    assert [member for member, *_ in forked(cluster, 0)] == [3]


def test_spares_that_end_are_replaced_but_not_for_ever(cluster) -> None:
    for member in range(2, 12):
        if member in cluster.nodes[1].ranks:
            cluster.alive(member)
            cluster.tick()
            cluster.end(member, code=1)
            cluster.tick()
    assert len(forked(cluster, 1)) == TRIES
    assert cluster.failures() == ["", ""]
