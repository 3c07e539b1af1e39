"""The stages of a change of members: what follows from what the leading agent sees."""

import pytest

from dynatrain.cluster.summons import GONE_SECONDS, Newcomer, Sight, Summons, advance, is_over
from dynatrain.observe.requests import Answer

OLD, LEAVE_SECONDS = (0, 1, 2), 10.0
COMING = Summons(
    generation=3,
    old=OLD,
    new=(0, 2, 5, 6),
    newcomers=(Newcomer(member=5, node=0, slot=3), Newcomer(member=6, node=1, slot=0)),
    layout="fsdp4",
    mode="tight",
)


def sight(waited: float = 1.0, **seen: object) -> Sight:
    return Sight(waited=waited, **{"living": OLD, **seen})


def test_a_summons_says_who_is_who_and_is_read_back_equal() -> None:
    assert (COMING.leavers, COMING.coming, COMING.holders) == ((1,), (5, 6), 5)
    assert COMING.arguments == {"layout": "fsdp4", "members": [0, 2, 5, 6], "generation": 3, "mode": "tight"}
    assert Summons.from_json(COMING.to_json()) == COMING


@pytest.mark.parametrize(
    ("stage", "seen", "following", "reason"),
    [
        ("coming", {"absent": (6,), "waited": 1e9}, "coming", ""),
        ("coming", {}, "asked", ""),
        ("coming", {"lost": ["a died", "b died"]}, "undone", "a died; b died"),
        ("coming", {"stopping": True}, "undone", "the run is stopping"),
        ("asked", {}, "asked", ""),
        ("asked", {"lost": ["a died"], "stopping": True, "published": True}, "asked", ""),  # decided before, perhaps
        ("asked", {"lost": ["a died"]}, "undone", "a died"),
        ("asked", {"stopping": True}, "undone", "the run is stopping"),
        ("asked", {"answer": Answer(outcome="done", message="fsdp4")}, "done", ""),
        ("asked", {"answer": Answer(outcome="aborted", message="no memory")}, "undone", "no memory"),
        ("asked", {"answer": Answer(outcome="refused", message="too late")}, "undone", "too late"),
        ("asked", {"living": (5, 6)}, "undone", "the run has ended"),
        ("done", {"stopping": True, "lost": ["a died"]}, "done", ""),
    ],
)
def test_the_stage_that_follows(stage, seen, following, reason) -> None:
    found = advance(COMING.at(stage), sight(**seen))
    assert (found.stage, found.reason) == (following, reason)


def test_it_is_over_when_every_agent_has_heard_and_who_was_to_go_is_gone() -> None:
    done, undone = COMING.at("done"), COMING.at("undone")
    heard, others = {0: "3 done", 1: "3 done"}, {0: "3 done", 1: "3 asked"}
    stay = (0, 2, 5, 6)
    assert is_over(done, sight(heard=heard, living=stay), LEAVE_SECONDS)
    assert not is_over(done, sight(heard=others, living=stay), LEAVE_SECONDS)
    assert not is_over(done, sight(heard=heard, living=(*stay, 1)), LEAVE_SECONDS)
    # A process that hangs in the kernel holds nobody up for ever.
    assert is_over(done, sight(LEAVE_SECONDS + GONE_SECONDS + 1, heard=heard, living=(*stay, 1)), LEAVE_SECONDS)
    gone = {0: "3 undone", 1: "3 undone"}
    assert is_over(undone, sight(heard=gone), LEAVE_SECONDS)
    assert not is_over(undone, sight(heard=gone, living=(*OLD, 6)), LEAVE_SECONDS)
    assert not is_over(COMING.at("asked"), sight(heard={0: "3 asked"}), LEAVE_SECONDS)
