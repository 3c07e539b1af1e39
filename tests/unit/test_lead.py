"""Agents of two nodes and their ranks in one process, without any: who is forked, killed, asked and answered, when."""

import pytest
from tests.clusters import LEAVE_SECONDS, PATIENCE, Cluster

from dynatrain.cluster.peers import Status
from dynatrain.cluster.summons import GONE_SECONDS
from dynatrain.cluster.worlds import crossing_board
from dynatrain.observe.log import Tail
from dynatrain.observe.requests import Answer


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def grown(cluster: Cluster) -> None:
    """To members 0, 2 on node 0 and 1, 3 on node 1."""
    cluster.ask("grow", size=4)
    cluster.beat(2, 3)
    cluster.tick()
    cluster.asked()
    cluster.reply("done")
    cluster.tick()
    assert cluster.answer("grow").outcome == "done"


def test_newcomers_are_forked_asked_for_when_they_have_beaten_and_admitted_by_the_ranks_answer(cluster) -> None:
    cluster.ask("a", size=4, mode="keep")
    contexts_told = [node.spawner.forked[1:] for node in cluster.nodes]
    assert [[(c.member, c.rank, c.local_rank) for c in told] for told in contexts_told] == [[(2, 1, 1)], [(3, 3, 1)]]
    told = contexts_told[0][0]
    assert (told.joins, told.world_size, told.generation, told.ranks_per_node) == (True, 4, 1, 1)
    cluster.beat(2)
    cluster.tick()
    assert cluster.board.news() == 0
    cluster.beat(3)
    cluster.tick(nodes=1)
    assert [node.part.summons.stage for node in cluster.nodes] == ["asked", "coming"]
    assert cluster.board.news() == 0  # not before the other agent has said that it has heard: its ranks may leave then
    cluster.tick()
    asked = cluster.asked()
    assert (asked["id"], asked["verb"]) == ("a", "scale")
    assert asked["arguments"] == {"layout": "dp4", "members": [0, 2, 1, 3], "generation": 1, "mode": "keep"}
    assert cluster.nodes[0].part.members == (0,)
    cluster.reply("done", "dp4 since step 7")
    cluster.tick()
    assert cluster.answer("a") == Answer(outcome="done", message="dp4 since step 7", switch=4)
    assert [node.part.members for node in cluster.nodes] == [(0, 2), (1, 3)]
    assert cluster.nodes[1].part.name(1) == "rank 2 (member 1, process 101)"


def test_it_is_done_when_leavers_are_gone_and_those_that_cling_are_killed(cluster) -> None:
    grown(cluster)
    cluster.ask("b", leave=[0, 2])
    cluster.end(1, signal=9)  # a leaver may be gone, and badly, before its agent knows that it may go
    for _ in range(3):
        cluster.tick()
        assert cluster.failures() == ["", ""]
    assert cluster.asked()["arguments"]["members"] == [2, 3]
    cluster.reply("done")
    cluster.tick()
    assert cluster.answer("b") is None
    cluster.tick(LEAVE_SECONDS - 1)
    assert cluster.nodes[0].spawner.killed == []
    cluster.tick(1)
    assert cluster.nodes[0].spawner.killed == [0]
    cluster.tick()
    assert cluster.answer("b") is None
    cluster.end(0, signal=9)
    cluster.beat(2, 3)
    cluster.tick()
    assert cluster.answer("b").outcome == "done"
    assert cluster.failures() == ["", ""]
    assert [line["member"] for line in Tail(cluster.run.events).new() if line["kind"] == "overdue"] == [0]
    assert [node.vitals.over() for node in cluster.nodes] == [False, False]


def test_a_leaver_that_hangs_in_the_kernel_holds_its_place_and_nobody_up(tmp_path) -> None:
    cluster = Cluster(tmp_path, devices=2)
    grown(cluster)
    cluster.ask("b", leave=[1])
    cluster.tick()
    cluster.asked()
    cluster.reply("done")
    cluster.tick(LEAVE_SECONDS + GONE_SECONDS + 1)
    cluster.tick()
    assert "not gone: members [2]" in cluster.answer("b").message
    cluster.ask("c", size=4)
    assert cluster.answer("c").message == "4 ranks need 1 more places than are free; nearest: 3 ranks"
    cluster.end(2, signal=9)
    cluster.tick()
    cluster.ask("d", size=4)
    assert [c.device for c in cluster.nodes[0].spawner.forked[-1:]] == ["cuda:1"]


def lent(tmp_path, devices: int = 2) -> Cluster:
    """Rank 1 of four, member 2, has left for another program."""
    cluster = Cluster(tmp_path, devices=devices)
    grown(cluster)
    cluster.ask("lend", "lend", leave=[1], layout="fsdp3")
    cluster.tick()
    cluster.asked()
    cluster.beat(0, layout="fsdp3")  # it trains before its agent has heard of it
    cluster.reply("done", "fsdp3 since step 9")
    assert cluster.answer("lend") is None  # it is said when its memory is back
    cluster.end(2)
    cluster.tick()
    return cluster


def test_lent_places_are_named_and_nobody_takes_them_until_they_are_reclaimed(tmp_path) -> None:
    cluster = lent(tmp_path)
    said = "fsdp3 since step 9; free, and kept until they are reclaimed: node 0 cuda:1"
    assert cluster.answer("lend") == Answer(outcome="done", message=said, switch=4)
    cluster.ask("more", size=4)
    assert cluster.answer("more").message == "4 ranks need 1 more places than are free; nearest: 3 ranks"
    cluster.ask("back", "reclaim")
    assert [(c.member, c.device) for c in cluster.nodes[0].spawner.forked[2:]] == [(4, "cuda:1")]
    cluster.beat(4)
    cluster.tick()
    asked = cluster.asked()
    assert (asked["verb"], asked["arguments"]["layout"], asked["arguments"]["members"]) == (
        "reclaim",
        "dp4",  # which it had before
        [0, 4, 1, 3],
    )
    cluster.reply("done", "dp4 since step 20")
    cluster.tick()
    assert cluster.answer("back").message == "dp4 since step 20"
    cluster.ask("again", "reclaim")
    assert cluster.answer("again") == Answer(outcome="unchanged", message="nothing is lent")
    told = [line["places"] for line in Tail(cluster.run.events).new() if line["kind"] == "lent"]
    assert told == ["node 0 cuda:1", ""]


def test_a_place_that_could_not_be_reclaimed_stays_lent_and_may_be_asked_for_again(tmp_path) -> None:
    cluster = lent(tmp_path)
    cluster.beat(0, layout="tp3")  # a layout of its own since: the nearest to it follows
    cluster.ask("back", "reclaim")
    cluster.end(4, code=1)
    cluster.tick()
    cluster.tick()
    assert "member 4 (process 0) ended with code 1 before it had joined" in cluster.answer("back").message
    cluster.ask("more", size=4)
    assert cluster.answer("more").outcome == "refused"
    cluster.ask("once_more", "reclaim")
    assert [(c.member, c.device) for c in cluster.nodes[0].spawner.forked[3:]] == [(5, "cuda:1")]
    cluster.beat(5)
    cluster.tick()
    assert cluster.asked()["arguments"]["layout"] == "tp4"


def test_a_place_whose_rank_hangs_in_the_kernel_is_lent_and_not_said_to_be_free(tmp_path) -> None:
    cluster = Cluster(tmp_path, devices=2)
    grown(cluster)
    cluster.ask("lend", "lend", leave=[1, 3])
    cluster.tick()
    cluster.asked()
    cluster.reply("done", "dp2")
    cluster.end(3)
    cluster.tick(LEAVE_SECONDS + GONE_SECONDS + 1)
    cluster.tick()
    said = "dp2; free, and kept until they are reclaimed: node 1 cuda:1; killed and not gone: members [2]"
    assert cluster.answer("lend").message == said
    cluster.ask("back", "reclaim")
    assert cluster.answer("back").message == "4 ranks need 1 more places than are free; nearest: 3 ranks"


def test_on_cpus_too_a_lent_place_is_nobody_elses(tmp_path) -> None:
    cluster = lent(tmp_path, devices=0)
    assert cluster.answer("lend").message.endswith("node 0 slot 1")
    cluster.ask("more", size=4)
    assert [(c.member, c.local_rank) for c in cluster.nodes[0].spawner.forked[2:]] == [(4, 2)]
    cluster.beat(4)
    cluster.tick()
    cluster.asked()
    cluster.reply("done")
    cluster.tick()
    cluster.ask("back", "reclaim")
    assert [(c.member, c.local_rank) for c in cluster.nodes[0].spawner.forked[3:]] == [(5, 1)]


def test_lending_starts_no_rank_and_a_lend_that_is_taken_back_keeps_no_place(cluster) -> None:
    cluster.ask("a", "lend", leave=[1], size=2)
    assert "2 ranks would be left of 2 of which 1 are lent; nearest: 1" in cluster.answer("a").message
    cluster.ask("b", "lend", size=1)
    cluster.tick()
    cluster.asked()
    cluster.reply("aborted", "why")
    cluster.tick()
    assert cluster.answer("b").message == "why"
    cluster.ask("c", "reclaim")
    assert cluster.answer("c").message == "nothing is lent"


def test_a_lost_newcomer_gives_the_crossing_up_before_and_after_the_ranks_were_asked(cluster) -> None:
    cluster.ask("a", size=3)
    cluster.end(2, code=1)
    cluster.tick()
    cluster.tick()
    assert cluster.answer("a").outcome == "aborted"
    assert "member 2 (process 0) ended with code 1 before it had joined" in cluster.answer("a").message
    assert (cluster.board.news(), cluster.failures()) == (0, ["", ""])
    cluster.ask("b", size=3)
    cluster.beat(3)
    cluster.tick()
    assert cluster.asked()["arguments"]["generation"] == 2
    cluster.end(3, signal=11)
    cluster.tick()
    go = crossing_board(cluster.store, 2, 3).go_edge(2)
    assert "member 3 (process 0) was killed by SIGSEGV" in go.reason
    assert cluster.answer("b") is None  # the ranks may have decided before
    cluster.reply("aborted", go.reason)
    cluster.tick()
    assert cluster.answer("b").outcome == "aborted"
    assert [node.part.world for node in cluster.nodes] == [(0, 1)] * 2


def test_a_silent_newcomer_is_killed_and_its_place_taken_by_the_next(cluster) -> None:
    cluster.ask("a", size=3)
    for _ in range(3):
        cluster.beat(0, 1)
        cluster.tick(PATIENCE / 2)
    assert cluster.nodes[0].spawner.killed == [2]
    assert cluster.answer("a") is None
    cluster.end(2, signal=9)
    cluster.tick()
    assert "no sign of life for 5 s from member 2" in cluster.answer("a").message
    cluster.ask("b", size=3)
    assert [(c.member, c.local_rank) for c in cluster.nodes[0].spawner.forked[1:]] == [(2, 1), (3, 1)]


def test_requests_wait_for_each_other_and_what_cannot_be_is_answered_at_once(cluster) -> None:
    cluster.ask("a", size=3)
    cluster.ask("b", size=6)
    assert cluster.answer("b") is None
    cluster.stopping = True
    cluster.tick()
    cluster.end(2, signal=9)
    cluster.tick()
    assert cluster.answer("a").message == "the run is stopping"
    assert cluster.answer("b") is None
    cluster.stopping = False
    cluster.tick()
    assert cluster.answer("b") == Answer(outcome="refused", message="6 ranks: at most 5; nearest: 5")
    cluster.ask("c", size=2)
    assert cluster.answer("c").outcome == "unchanged"
    cluster.ask("d", leave=[2])
    assert cluster.answer("d").message == "there are no ranks [2]; the run has 0 to 1"
    cluster.ask("e", size=2, layout="tp2", mode="tight")
    assert cluster.asked()["verb"] == "switch"
    assert cluster.asked()["arguments"] == {"layout": "tp2", "mode": "tight"}


def test_a_layout_is_chosen_from_that_which_rank_0_said_last_or_a_crossing_made(cluster) -> None:
    cluster.beat(0, layout="tp2")
    cluster.ask("a", size=3)
    cluster.beat(2)
    cluster.tick()
    assert cluster.asked()["arguments"]["layout"] == "tp3"
    cluster.reply("aborted")
    cluster.end(2)
    cluster.tick()
    cluster.ask("b", size=3, layout="dp3")
    cluster.beat(3)
    cluster.tick()
    cluster.asked()
    cluster.reply("done")
    cluster.tick()
    cluster.ask("c", size=2)  # rank 0 has not said yet that it is in dp3
    cluster.tick()
    assert cluster.asked()["arguments"]["layout"] == "dp2"


def test_an_agent_without_ranks_waits_for_the_others_and_ends_as_they_do(cluster) -> None:
    cluster.ask("a", leave=[1])
    cluster.tick()
    cluster.asked()
    cluster.end(1)
    cluster.reply("done")
    cluster.tick()
    assert cluster.answer("a").outcome == "done"
    second = cluster.nodes[1].vitals
    assert not second.over()
    cluster.end(0, code=75)
    assert (cluster.nodes[0].vitals.over(), cluster.nodes[0].vitals.code()) == (True, 75)
    cluster.nodes[0].peers.say(Status(state="done", code=75))
    cluster.nodes[1].peers.look()
    assert (second.over(), second.code()) == (True, 75)


def test_bad_ends_are_told_while_the_run_is_stopping_too(cluster) -> None:
    cluster.stopping = True
    cluster.end(1, code=1)
    cluster.tick()
    assert cluster.failures() == ["", "rank 1 (process 101) ended with code 1, in phase start, step 0"]


def test_a_crossing_that_the_end_of_the_run_overtakes_is_answered(cluster) -> None:
    cluster.ask("a", size=1)
    cluster.tick()
    cluster.asked()
    cluster.end(0)
    cluster.end(1)
    assert not cluster.nodes[0].vitals.over()  # the answer may be on its way
    cluster.tick()
    cluster.tick()
    assert cluster.answer("a") == Answer(outcome="aborted", message="the run has ended")
    assert cluster.nodes[0].vitals.over()


@pytest.mark.parametrize(("asked", "said"), [(False, "the run is stopping"), (True, "the run has ended")])
def test_a_crossing_that_is_open_when_the_agent_ends_is_answered_and_closed(cluster, asked, said) -> None:
    cluster.ask("a", size=3)
    if asked:
        cluster.beat(2)
        cluster.tick()
    cluster.lead.end()
    assert cluster.answer("a") == Answer(outcome="aborted", message=said)
    stages = [event["stage"] for event in Tail(cluster.run.events).new() if event["kind"] == "crossing"]
    assert stages == ["coming", *["asked"] * asked, "undone"]


def test_the_step_that_other_members_were_asked_for_goes_with_the_question_to_the_ranks(cluster) -> None:
    grown(cluster)
    cluster.ask("b", verb="lend", leave=[3], at=40)
    for _ in range(3):
        cluster.tick()

    assert cluster.asked()["arguments"] == {"layout": "dp3", "members": [0, 2, 1], "generation": 2, "at": 40}
