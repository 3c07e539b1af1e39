"""What rank 0 takes next of what is asked for: while the job is parked, and beside other jobs of its process."""

import json
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.execute.pieces import Pool
from dynatrain.execute.promise import Promise
from dynatrain.layout.text import parse_layout
from dynatrain.train.standing import NameTakenError, standing
from dynatrain.train.targets import whole_world
from dynatrain.train.turns import Turns
from dynatrain.train.wishes import Wishes


class Job:
    """Rank 0 of a job of two ranks."""

    def __init__(self, memory=None, schedule=None):
        self.board = Board(HashStore(), 2)
        self.parking = SimpleNamespace(parked=False)
        party = SimpleNamespace(
            rank=0, world_size=2, members=(0, 1), worlds=None, board=self.board, memory=memory or Pool()
        )
        wishes = Wishes(self.board, schedule or {}, "keep", every=10)
        saver = SimpleNamespace(busy=False, on=True)
        self.refused = []
        self.turns = Turns(
            *(party, wishes, whole_world, lambda: parse_layout("fsdp2"), saver, self.parking, 0),
            refused=lambda order, step, why: self.refused.append((order.layout, order.by, step, why)),
        )

    def ask(self, verb, **arguments):
        return self.board.publish(json.dumps({"verb": verb, "arguments": arguments}))

    def answer(self, number):
        text = self.board.take_answer(number)
        return text and tuple(json.loads(text)[key] for key in ("outcome", "message"))


def test_a_parked_job_answers_requests_and_takes_those_alone_that_bring_it_back():
    job = Job(schedule={8: "dp2"})
    idle = job.ask("unpark")
    assert job.turns.take(0, 0) is None
    assert job.answer(idle) == ("unchanged", "the run is not parked")
    job.ask("park")
    park = job.turns.take(1, 1)
    assert (park.verb, park.number, park.numbered, park.switches) == ("park", 1, True, False)
    job.parking.parked = True
    asked = [job.ask("switch", layout="dp2"), job.ask("save"), job.ask("scale", layout="dp3"), job.ask("park")]
    assert job.turns.take(2, 9) is None  # the switch and the save that are due by then wait
    refused = ("refused", "the run is parked: its state is in host memory; unpark it first")
    assert [job.answer(number) for number in asked] == [refused, refused, refused, ("unchanged", "the run is parked")]
    job.ask("unpark")
    unpark = job.turns.take(2, 9)
    assert (unpark.verb, unpark.number) == ("unpark", 2)
    job.parking.parked = False
    assert job.turns.take(3, 9).layout == "dp2"


def test_a_stop_is_taken_while_parked_and_an_order_of_the_jobs_own_has_the_next_number():
    job = Job()
    job.parking.parked = True
    job.ask("stop")
    assert job.turns.take(1, 1).verb == "stop"
    own = job.turns.own("unpark", parse_layout("fsdp2"), by="SIGTERM")
    assert (own.number, own.layout, own.by, job.turns.switches) == (1, "fsdp2", "SIGTERM", 1)


@pytest.mark.parametrize("verb", ["switch", "park"])
def test_a_switch_waits_for_that_of_another_job_under_one_promise_and_a_save_does_not(verb):
    promise = Promise(100)
    actor, critic = Job(Pool(promise=promise)), Job(Pool(promise=promise))
    arguments = {"layout": "dp2"} if verb == "switch" else {}
    actor.ask(verb, **arguments)
    first = actor.turns.take(0, 0)
    critic.ask(verb, **arguments)
    critic.ask("save")
    assert critic.turns.take(0, 0).verb == "save"
    assert critic.turns.take(1, 1) is None
    actor.turns.answer(first, "aborted", "why")
    assert critic.turns.take(2, 2).verb == verb


def test_a_run_of_the_agents_is_one_job_and_a_promise_belongs_to_the_memory_that_is_given():
    with pytest.raises(NameTakenError, match="a run under the agent has one job, without a name"):
        standing(SimpleNamespace(), None, None, None, None, name="actor")
    with pytest.raises(ValueError, match="give the promise to the memory"):
        standing(None, None, None, None, Pool(), promise=Promise(1))
    with pytest.raises(ValueError, match="a promise of 0 bytes: at least 1"):
        Promise(0)


def test_the_present_layout_can_be_prepared_which_frees_what_is_held_and_an_impossible_one_is_refused():
    job = Job()
    job.ask("prepare", layout="fsdp2")
    order = job.turns.take(0, 0)
    assert (order.verb, order.number, order.builds, order.switches) == ("prepare", 1, True, False)
    refused = job.ask("prepare", layout="dp3")
    assert job.turns.take(1, 1) is None
    assert job.answer(refused)[0] == "refused"


def test_a_scheduled_switch_that_is_not_possible_any_more_is_told_and_not_dropped_in_silence(caplog):
    job = Job(schedule={8: "dp3", 12: "dp2"})
    assert job.turns.take(0, 6) is None
    ((layout, by, step, why),) = job.refused
    assert (layout, by, step) == ("dp3", "schedule", 6)
    assert "dp3" in why
    assert f"switch to dp3, asked for by schedule: {why}" in caplog.text
    asked = job.ask("switch", layout="dp3")
    assert job.turns.take(1, 7) is None
    assert job.answer(asked)[0] == "refused"
    assert len(job.refused) == 1, "who asked by a request has the answer"
