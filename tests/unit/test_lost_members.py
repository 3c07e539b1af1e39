"""What agents do about lost members: who is summoned, when it stands, and what becomes of what was under way."""

from dataclasses import replace

import pytest
from tests.clusters import PATIENCE, Cluster

from dynatrain.cluster.alarm import loss_key
from dynatrain.cluster.meeting import RunFailedError
from dynatrain.cluster.peers import Status
from dynatrain.cluster.summons import Summons
from dynatrain.cluster.worlds import COMMIT, crossing_board


class Losing(Cluster):
    """Two nodes with a rank each, whose ranks go on without members that are lost."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.lead._job = replace(self.lead._job, survives=True)
        for node in self.nodes:
            node.vitals._survives = True
        self.beat(0, 1, layout="dp2")
        self.tick()

    def tick(self, seconds: float = 0.2, times: int = 4, nodes: int = 2) -> None:
        for _ in range(times):
            self.now += seconds / times
            for node in self.nodes[:nodes]:
                node.pulse.look()
                node.peers.look()
                assert node.vitals.failure(self.now, stopping=False) == ""
                fallen = tuple(node.vitals.fallen.items())
                told = Status(living=node.ranks.living, heard=node.part.heard, lost=node.part.lost, fallen=fallen)
                node.peers.say(told)
                if node is self.nodes[0]:
                    self.desk.serve()
                    self.lead.look(stopping=False)
                node.part.look(self.now)

    def loss(self, number: int) -> Summons | None:
        text = self.board.peek(loss_key(number))
        return None if text is None else Summons.from_json(text)

    def decide(self, loss: Summons, outcome: dict) -> dict:
        """What the ranks decide of the crossing; what stands."""
        return crossing_board(self.store, loss.generation, loss.holders).decide(COMMIT, outcome)

    def grow(self) -> None:
        """To members 0, 2 on node 0 and 1, 3 on node 1."""
        self.ask("grow", size=4)
        self.beat(2, 3, layout="dp4")
        self.tick()
        self.asked()
        self.reply("done")
        self.beat(0, 1, 2, 3, layout="dp4")
        self.tick()


@pytest.fixture
def cluster(tmp_path):
    return Losing(tmp_path)


def test_a_killed_rank_is_mourned_at_once_and_the_others_go_on_when_they_have_decided_to(cluster) -> None:
    cluster.end(1, signal=9)
    cluster.tick(times=2)

    loss = cluster.loss(1)
    assert (loss.generation, loss.old, loss.new, loss.lost, loss.layout) == (1, (0, 1), (0,), (1,), "dp1")
    assert loss.why.startswith("rank 1 (process 101) was killed by SIGKILL, in phase")
    assert cluster.nodes[0].part.world == (0, 1)
    cluster.decide(loss, {})
    cluster.tick()
    assert [node.part.world for node in cluster.nodes] == [(0,)] * 2
    assert cluster.loss(2) is None


def test_a_silent_rank_is_killed_before_others_take_its_place(cluster) -> None:
    for _ in range(3):
        cluster.beat(0, layout="dp2")
        cluster.tick(PATIENCE / 2)
    assert cluster.nodes[1].spawner.killed[0] == 1
    assert "no sign of life for 5 s from rank 1" in cluster.loss(1).why


def test_whoever_falls_before_the_others_have_decided_is_of_the_next_loss_from_the_same_world(cluster) -> None:
    cluster.grow()
    cluster.end(1, signal=9)
    cluster.tick()
    cluster.end(2, signal=9)
    cluster.tick()

    first, second = cluster.loss(1), cluster.loss(2)
    assert (first.old, first.lost, first.new) == ((0, 2, 1, 3), (1,), (0, 2, 3))
    assert (second.old, second.lost, second.new) == ((0, 2, 1, 3), (2, 1), (0, 3))
    assert second.generation == first.generation + 1
    assert "abort" in cluster.decide(first, {})  # too late


def test_whoever_falls_behind_the_decision_is_of_the_world_that_it_has_led_to(cluster) -> None:
    cluster.grow()
    cluster.end(1, signal=9)
    cluster.tick()
    cluster.decide(cluster.loss(1), {})
    cluster.end(2, signal=9)
    cluster.tick()

    second = cluster.loss(2)
    assert (second.old, second.lost, second.new) == ((0, 2, 3), (2,), (0, 3))


def test_a_loss_in_the_midst_of_a_change_of_members_ends_that_first(cluster) -> None:
    cluster.ask("more", size=4)
    cluster.beat(2, 3)
    cluster.tick()
    cluster.end(1, signal=9)
    cluster.tick()

    assert cluster.answer("more").outcome == "aborted"
    assert (cluster.loss(1).old, cluster.loss(1).new) == ((0, 1), (0,))
    assert [node.spawner.killed for node in cluster.nodes] == [[2], [3]]


@pytest.mark.parametrize(("committed", "world"), [(False, (0, 1)), (True, (0, 2, 1, 3))])
def test_what_the_ranks_were_asked_is_taken_down_and_answered_as_they_had_decided(cluster, committed, world) -> None:
    cluster.ask("more", size=4)
    cluster.beat(2, 3, layout="dp4")
    cluster.tick()
    asked = cluster.asked()["arguments"]
    board = crossing_board(cluster.store, asked["generation"], 4)
    if committed:
        board.decide(COMMIT, {})
    cluster.end(1, signal=9)
    cluster.tick()

    assert cluster.answer("more").outcome == ("done" if committed else "aborted")
    assert cluster.board.read(cluster.number) is None
    assert (cluster.loss(1).old, cluster.loss(1).generation) == (world, asked["generation"] + 1)


@pytest.mark.parametrize("fate", ["killed", "silent"])
@pytest.mark.parametrize("committed", [False, True])
def test_a_leaver_that_falls_before_its_crossing_is_decided_is_lost_and_one_that_had_left_is_not(
    cluster, fate, committed
) -> None:
    cluster.ask("fewer", leave=[1])
    cluster.tick()
    asked = cluster.asked()["arguments"]
    if committed:
        crossing_board(cluster.store, asked["generation"], 2).decide(COMMIT, {})
    if fate == "killed":
        cluster.end(1, signal=9)
        cluster.tick()
    for _ in range(0 if fate == "killed" else 3):
        cluster.beat(0, layout="dp2")
        cluster.tick(PATIENCE / 2)

    assert cluster.answer("fewer").outcome == ("done" if committed else "aborted")
    assert (cluster.loss(1) is None) == committed
    assert committed or (cluster.loss(1).lost, cluster.loss(1).new) == ((1,), (0,))


def test_all_members_of_a_node_are_lost_with_its_agent(cluster) -> None:
    cluster.grow()
    for _ in range(3):
        cluster.beat(0, 2, layout="dp4")
        cluster.tick(PATIENCE / 2, nodes=1)
    assert (cluster.loss(1).lost, cluster.loss(1).new) == ((1, 3), (0, 2))
    assert "the agent of node 1 is silent" in cluster.loss(1).why
    cluster.decide(cluster.loss(1), {})
    cluster.beat(0, 2, layout="dp2")
    cluster.tick(nodes=1)
    assert cluster.nodes[0].part.world == (0, 2)
    cluster.nodes[1].part.look(cluster.now)  # it was cut off, and comes back
    assert set(cluster.nodes[1].spawner.killed) == {1, 3}
    assert cluster.nodes[1].part.members == ()


def test_a_loss_before_the_first_step_ends_the_run(cluster) -> None:
    cluster.beat(1, layout="")
    cluster.end(1, signal=9)
    with pytest.raises(RunFailedError, match=r"killed by SIGKILL.*members \[1\] were not ready for their first step"):
        cluster.tick()


def test_whoever_is_lost_when_the_others_have_ended_is_missed_by_nobody(cluster) -> None:
    cluster.end(0)
    cluster.end(1, signal=9)
    cluster.tick()
    assert cluster.loss(1) is None
    assert cluster.nodes[0].vitals.over()
    assert cluster.nodes[0].vitals.code() == 0


def test_what_is_left_and_cannot_go_on_ends_the_run_with_both_reasons(cluster) -> None:
    cluster.end(1, signal=9)
    cluster.tick(times=2)
    cluster.decide(cluster.loss(1), {"abort": "planted"})
    with pytest.raises(RunFailedError, match=r"killed by SIGKILL.*and the run cannot go on: planted"):
        cluster.tick()


def test_as_many_as_are_to_be_are_replaced_and_the_layout_before_comes_back(cluster) -> None:
    cluster.lead._losses._replacements = 1
    cluster.grow()
    cluster.end(1, signal=9)
    cluster.tick()
    cluster.decide(cluster.loss(1), {})
    cluster.beat(0, 2, 3, layout="dp3")
    cluster.tick()
    cluster.tick()
    (coming,) = cluster.nodes[1].spawner.forked[2:]  # behind members 1 and 3 of its node
    assert (coming.member, coming.world_size, coming.joins) == (4, 4, True)
    cluster.beat(4)
    cluster.tick()
    asked = cluster.asked()
    assert (asked["by"], asked["arguments"]["layout"], asked["arguments"]["members"]) == ("loss", "dp4", [0, 2, 3, 4])
    cluster.reply("done")
    cluster.tick()

    cluster.beat(0, 2, 3, 4, layout="dp4")
    cluster.end(3, signal=9)
    cluster.tick()
    cluster.decide(cluster.loss(2), {})
    cluster.tick()
    cluster.tick()
    assert len(cluster.nodes[1].spawner.forked) == 3  # none is left
