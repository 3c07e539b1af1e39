"""Hosts that leave: what two notices mean, and the lead, agents and ranks of three nodes in one process."""

import pytest
from tests.clusters import GRACE, LEAVE_SECONDS, Cluster

from dynatrain.cluster.parting import WISH_SECONDS, largest, verdict
from dynatrain.cluster.peers import Status
from dynatrain.cluster.summons import GONE_SECONDS
from dynatrain.observe.log import Tail


def test_hosts_go_when_the_last_notice_is_old_enough_and_stop_when_half_the_grace_is_over() -> None:
    assert verdict([0.0], 30) == "wait"
    assert verdict([10.0, WISH_SECONDS - 0.1], 30) == "wait"
    assert verdict([10.0, WISH_SECONDS], 30) == "go"
    assert verdict([15.1, WISH_SECONDS], 30) == "stop"
    assert verdict([15.1, 0.0], 30) == "stop"
    assert verdict([0.6], 2) == "go"  # of a short grace a quarter is waited, not the whole


def test_the_largest_world_is_looked_for_below_what_there_may_be() -> None:
    def layout_of(size: int) -> str:
        if size % 3:
            raise ValueError(f"{size}: not a multiple of 3")
        return f"tp{size}"

    assert largest(5, layout_of) == (3, "tp3")
    with pytest.raises(ValueError, match="2: not a multiple"):
        largest(2, layout_of)
    with pytest.raises(ValueError, match="one stays"):
        largest(0, layout_of)


@pytest.fixture
def three(tmp_path) -> Cluster:
    return Cluster(tmp_path, nodes=3)


def events(cluster: Cluster, kind: str) -> list[dict]:
    return [event for event in Tail(cluster.run.events).new() if event["kind"] == kind]


def told(cluster: Cluster, *nodes: int) -> None:
    """Signals have told hosts to go, and the moment in which others may be told is over."""
    for node in nodes:
        cluster.nodes[node].state = "leaving"
    cluster.tick()
    assert cluster.board.news() == 0
    cluster.tick(WISH_SECONDS)
    cluster.tick()


def ended(cluster: Cluster, node: int) -> None:
    """The agent of a node that was let go ends."""
    assert cluster.nodes[node].peers.released
    cluster.nodes[node].peers.say(Status(state="left"))
    cluster.nodes[node].state = "left"


def handed_over(cluster: Cluster, *leavers: int) -> None:
    """The ranks agree, and who leaves ends."""
    cluster.asked()
    for member in leavers:
        cluster.end(member)
    cluster.reply("done")
    cluster.tick()


def test_a_notice_to_one_host_lets_it_go_and_the_others_train_on(three) -> None:
    told(three, 2)
    assert three.asked()["arguments"] == {"layout": "dp2", "members": [0, 1], "generation": 1}
    assert three.asked()["by"] == "SIGTERM"
    assert not three.nodes[2].peers.released
    handed_over(three, 2)
    ended(three, 2)
    three.now += 100  # nobody misses it
    three.beat(0, 1)
    for node in three.nodes[:2]:
        node.peers.say(Status(heard=node.part.heard, living=node.ranks.living))
    three.tick()
    assert (three.lead.must_stop, three.failures()[:2]) == ("", ["", ""])
    assert [event["node"] for event in events(three, "host_left")] == [2]
    three.ask("grow", size=4)
    assert [len(node.spawner.forked) for node in three.nodes[:2]] == [2, 2]


def test_hosts_that_are_told_together_leave_in_one_change(three) -> None:
    three.nodes[2].state = "leaving"
    three.tick(WISH_SECONDS / 2)
    three.nodes[1].state = "leaving"
    three.tick(WISH_SECONDS * 0.9)
    assert three.board.news() == 0
    told(three)
    assert three.asked()["arguments"]["members"] == [0]
    handed_over(three, 1, 2)
    for node in (1, 2):
        ended(three, node)
    three.tick()
    assert [event["node"] for event in events(three, "host_left")] == [1, 2]
    assert three.lead.must_stop == ""


def test_a_smaller_legal_world_is_taken_and_where_there_is_none_the_run_stops(tmp_path) -> None:
    four = Cluster(tmp_path / "a", nodes=4)
    four.beat(0, layout="even4")
    told(four, 3)
    assert four.asked()["arguments"]["layout"] == "even2"
    two = Cluster(tmp_path / "b")
    two.beat(0, layout="even2")
    told(two, 1)
    assert "1 ranks: not even" in two.lead.must_stop
    assert not two.nodes[1].peers.released


def test_what_the_ranks_give_up_stops_the_run_and_so_does_half_of_the_grace(tmp_path) -> None:
    refused = Cluster(tmp_path / "a")
    told(refused, 1)
    refused.asked()
    refused.reply("aborted", "no memory")
    refused.tick()
    assert "no memory" in refused.lead.must_stop
    slow = Cluster(tmp_path / "b")
    told(slow, 1)
    slow.tick(GRACE / 2 - WISH_SECONDS - 2)
    assert slow.lead.must_stop == ""
    slow.tick(2)
    assert "nodes [1] have not handed over within 15 s" in slow.lead.must_stop


def test_once_the_ranks_have_handed_over_the_end_of_leavers_stops_nothing(three) -> None:
    told(three, 2)
    three.asked()
    three.tick(GRACE / 2 - WISH_SECONDS - 1.5)
    three.reply("done")
    three.tick(2)
    assert (three.lead.must_stop, three.answer("none")) == ("", None)


def test_a_host_is_drained_on_request_and_the_answer_waits_for_its_agent(three) -> None:
    three.ask("a", nodes=[1])
    three.tick()
    handed_over(three, 1)
    three.tick()
    assert three.answer("a") is None
    ended(three, 1)
    three.tick()
    assert (three.answer("a").outcome, three.answer("a").message) == ("done", "gone: nodes [1]")
    three.ask("b", nodes=[0])
    assert "node 0 leads the run" in three.answer("b").message
    three.ask("c", nodes=[1])
    assert three.answer("c").message == "there are no nodes [1]; the run has nodes [0, 2]"
    three.ask("d", leave=[1])  # node 2's agent stays, without ranks
    three.tick()
    handed_over(three, 2)
    assert three.answer("d").outcome == "done"
    three.ask("e", nodes=[2])
    three.tick(LEAVE_SECONDS + GONE_SECONDS + 1)
    assert three.answer("e").message == "they had no ranks; gone: nodes [2]; not heard of since: nodes [2]"


def test_a_drain_that_is_taken_back_leaves_the_host_open_for_newcomers(three) -> None:
    three.ask("a", nodes=[1])
    three.tick()
    three.asked()
    three.reply("aborted", "no memory")
    three.tick()
    assert (three.answer("a").outcome, three.lead.must_stop) == ("aborted", "")
    three.ask("b", size=5)
    assert [len(node.spawner.forked) for node in three.nodes] == [2, 2, 1]


@pytest.mark.parametrize("nodes", [(0,), (0, 2)])
def test_a_notice_to_the_host_that_leads_is_for_the_others_to_go_on_under_another_lead(three, nodes) -> None:
    told(three, *nodes)
    assert (three.lead.hands_over, three.lead.must_stop) == (True, "")
    assert not events(three, "crossing")
    assert not three.nodes[2].peers.released


def test_where_all_hosts_are_told_or_the_rest_has_no_layout_the_run_stops(tmp_path) -> None:
    three = Cluster(tmp_path / "a", nodes=3)
    told(three, 0, 1, 2)
    assert (three.lead.hands_over, "no rank would be left" in three.lead.must_stop) == (False, True)
    two = Cluster(tmp_path / "b")
    two.beat(0, layout="even2")
    told(two, 0)
    assert (two.lead.hands_over, "1 ranks: not even" in two.lead.must_stop) == (False, True)
