"""What users meet at the edges of a switch: long steps, late requests, slow digests, ranks that hold nothing yet."""

import json
import random
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, batch, build_net, everywhere, idle, switcher, until_ended, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from dynatrain.execute import census
from dynatrain.plan.schedule import default_budget
from dynatrain.train import blueprint
from dynatrain.train.agreement import SwitchFailedError
from dynatrain.train.retire import RetiredHandleError
from dynatrain.train.states import UnknownStateError


def train(sw, step, rank):
    """One step of the user's."""
    inputs, targets = batch(step, rank)
    functional.mse_loss(sw.model(inputs), targets).backward()
    sw.optimizer.step()
    sw.optimizer.zero_grad()


def test_the_order_of_hand_overs_is_rank_0s_also_where_another_rank_would_find_another(monkeypatch):
    own = blueprint.tight_schedule

    def work(world):
        if world.rank == 1:  # as another processor's last bits would
            monkeypatch.setattr(blueprint, "tight_schedule", lambda *a: reverse(own(*a)))
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books, mode="tight")
        sw.request("dp2")
        return [end[1] for end in until_ended(sw, books)]

    def reverse(schedule):
        assert len(schedule.rounds[0]) > 1 or len(schedule.rounds) > 1
        return type(schedule)(rounds=tuple(r[::-1] for r in schedule.rounds[::-1]), mode=schedule.mode)

    assert everywhere(2, work) == [["committed"]] * 2


@pytest.mark.parametrize("mode", [pytest.param("keep", marks=pytest.mark.sweep), "tight"])
def test_an_abort_waits_for_digests_that_are_still_taken_of_the_memory_that_it_frees(mode, monkeypatch):
    def work(world):
        books, own, slow = Books(), census.digest_within, [False]

        def digest(*given):
            if slow[0]:
                time.sleep(0.3)
            return own(*given)

        monkeypatch.setattr(census, "digest_within", digest)
        sw = switcher(world, build_net, "fsdp2", recorder=books, mode=mode, deadline=1.5)
        before = {name: whole(entry.value) for name, entry in sw.world.found.items()}

        def hook(event, *_):
            slow[0] = world.rank == 1 and (event == "check" or (slow[0] and event == "commit"))

        sw._party.hook = hook
        sw.request("dp2")
        (end,) = until_ended(sw, books)
        after = {name: whole(entry.value) for name, entry in sw.world.found.items()}
        return end[1], end[2], all(torch.equal(before[name], after[name]) for name in before)

    for outcome, reason, same in everywhere(2, work):
        assert outcome == "aborted"
        assert "late" in reason or "in time" in reason
        assert same


def test_a_thread_of_digests_that_never_ends_stops_the_run_instead_of_crashing_it(monkeypatch):
    def work(world):
        books, own = Books(), census.digest_within

        def digest(*given):
            time.sleep(20 if world.rank == 1 and hung else 0)
            return own(*given)

        hung = []
        monkeypatch.setattr(census, "digest_within", digest)
        sw = switcher(world, build_net, "fsdp2", recorder=books, deadline=0.3)
        sw._party.hook = lambda event, *_: hung.append(event) if event == "check" else None
        sw.request("dp2")
        try:
            until_ended(sw, books)
        except SwitchFailedError as failure:
            return str(failure)
        except RuntimeError:  # the other rank is gone
            return ""
        return "no failure"

    assert "does not end" in everywhere(2, work)[1]


class CachingAverage:
    """An average that keeps a list of its tensors for grouped operations, and forgets to renew it."""

    def __init__(self, net):
        self.shadow = {name: value.detach().clone() for name, value in net.named_parameters()}
        self.cached = list(self.shadow.values())

    def state_dict(self):
        return {"shadow": dict(self.shadow)}

    def load_state_dict(self, state):
        self.shadow = dict(state["shadow"])


def test_a_tensor_that_a_registered_object_cached_says_so_instead_of_crashing():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        average = sw.register("ema", CachingAverage(sw.model))
        sw.request("dp2")
        until_ended(sw, books)
        with pytest.raises(RetiredHandleError, match=r"ema\.shadow of .* belongs to a layout that switch 1 to dp2"):
            average.cached[0].mul_(0.5)
        return [end[1] for end in books.ends], all(map(torch.isfinite, (v.sum() for v in average.shadow.values())))

    assert everywhere(2, work) == [(["committed"], True)] * 2


def test_an_unknown_mode_is_refused_with_the_nearest():
    def work(world):
        found = []
        try:
            switcher(world, build_net, "fsdp2", mode="Keep")
        except ValueError as error:
            found.append(str(error))
        sw = switcher(world, build_net, "fsdp2", name="again")
        try:
            sw.request("dp2", mode="thight")
        except ValueError as error:
            found.append(str(error))
        return found

    for first, second in everywhere(2, work):
        assert first == "there is no mode 'Keep'; the modes are keep, tight, auto (nearest: keep)"
        assert second.endswith("(nearest: tight)")


def test_the_measured_peak_is_that_of_the_switch_and_not_of_one_before():
    def work(world):
        books = Peaks()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        for layout, mode in (("dp2", "keep"), ("fsdp2", "tight")):
            sw.request(layout, mode=mode)
            until_ended(sw, books)
        return books.peaks

    class Peaks(Books):
        def __init__(self):
            super().__init__()
            self.peaks = []

        def ended(self, attempt, outcome, reason, _step, told):
            super().ended(attempt, outcome, reason)
            mine = told[attempt.party.rank]
            predicted = attempt.blueprint.peak[attempt.party.rank] + mine["staging"]
            budget = default_budget(blueprint._table(attempt.old, attempt.new))
            self.peaks.append((mine["peak"], predicted, budget))

    for (first, _, _), (second, predicted, budget) in everywhere(2, work):
        assert second < first, "the second switch, in tight, has a peak of its own"
        assert second <= predicted <= second + budget


def test_steps_longer_than_the_deadline_do_not_make_ranks_late():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books, deadline=0.8)
        for step in sw.steps(until=6):
            if step == 1:
                sw.request("dp2")
            time.sleep(0.1 if world.rank == 0 else 1.2)  # the ranks are as far apart as a step allows
            dist.barrier()
        return [end[1:] for end in books.ends]

    assert everywhere(2, work) == [[("committed", "")]] * 2


def test_a_request_taken_up_after_its_deadline_is_refused():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        board = sw._party.board
        record = {"id": "a", "verb": "switch", "arguments": {"layout": "dp2"}, "by": "cli", "deadline": time.time() - 1}
        if world.rank == 0:
            number = board.publish(json.dumps(record))
        for _ in idle(sw, 20):
            pass
        return books.ends, json.loads(board.take_answer(number))["outcome"] if world.rank == 0 else "refused"

    assert everywhere(2, work) == [([], "refused")] * 2


def build_half_frozen(mesh, layout):
    """Two stages, or one; the first half is frozen."""
    stage, stages = mesh.get_local_rank("pp"), layout.size("pp")
    halves = {"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)}
    mine = list(halves)[stage : stage + 1] if stages == 2 else list(halves)
    part = nn.Sequential(OrderedDict((name, halves[name]) for name in mine)).double()
    halves["0"].requires_grad_(requires_grad=False)
    fully_shard(part, mesh=mesh["fsdp"])
    return part, torch.optim.AdamW(part.parameters(), lr=1e-2)


def test_a_rank_that_held_no_optimizer_state_receives_it():
    def work(world):
        books = Books()
        sw = switcher(world, build_half_frozen, "pp2", recorder=books, data_parallel="free")
        had = sum(map(len, sw.optimizer.state.values()))
        for layout in ("fsdp2", "pp2", "fsdp2"):
            sw.request(layout)
            until_ended(sw, books)
        held = {key for values in sw.optimizer.state.values() for key in values}
        return [end[1:] for end in books.ends], had, held

    for (ends, had, held), before in zip(everywhere(2, work), (0, 6), strict=True):
        assert ends == [("committed", "")] * 3
        assert had == before
        assert held == {"step", "exp_avg", "exp_avg_sq"}


class TrainedAverage:
    """An average of what is trained, and of nothing else."""

    def __init__(self, part):
        self.shadow = {name: p.detach().clone() for name, p in part.named_parameters() if p.requires_grad}

    def state_dict(self):
        return {"shadow": dict(self.shadow)}

    def load_state_dict(self, state):
        self.shadow = dict(state["shadow"])


def test_a_rank_that_held_nothing_of_a_registered_object_receives_it():
    def work(world):
        books = Books()
        sw = switcher(world, build_half_frozen, "pp2", recorder=books, data_parallel="free")
        average = sw.register("ema", TrainedAverage(sw.model))
        before = sorted(average.shadow)
        sw.request("fsdp2")
        until_ended(sw, books)
        return [end[1:] for end in books.ends], before, sorted(average.shadow)

    for (ends, before, after), had in zip(everywhere(2, work), ([], ["1.bias", "1.weight"]), strict=True):
        assert (ends, before) == ([("committed", "")], had)
        assert after == ["1.bias", "1.weight"]


def test_a_switch_waits_for_the_step_that_uses_accumulated_gradients():
    def work(world):
        books, at = Books(), []
        sw = switcher(world, build_net, "fsdp2", recorder=books, schedule={5: "dp2"})
        sw._party.hook = lambda event, *_: at.append(sw.step) if event == "quiesce" else None
        for step in sw.steps(until=12):
            inputs, targets = batch(step, world.rank)
            sw.model.set_requires_gradient_sync(step % 4 == 3)
            functional.mse_loss(sw.model(inputs), targets).backward()
            if step % 4 == 3:
                sw.optimizer.step()
                sw.optimizer.zero_grad()
        return [end[1] for end in books.ends], at

    assert everywhere(2, work) == [(["committed"], [8])] * 2


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (3, "scaler: int is neither an object with state_dict"),
        (lambda _: 3, "scaler: the factory made int, without state_dict"),
        (torch.optim.lr_scheduler.CosineAnnealingLR, "scaler: the factory fails on the optimizer"),
        (lambda _: 1 / 0, "scaler: the factory fails on the optimizer: division by zero"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(thing, said):
    def work(world):
        try:
            switcher(world, build_net, "dp1", state={"scaler": thing})
        except UnknownStateError as error:
            return str(error)
        return ""

    assert said in everywhere(1, work)[0]


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_is_added_after_build_aborts_the_switch_by_name(kind):
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        if kind == "buffer":
            sw.model.register_buffer("late", torch.zeros(3))
        else:
            sw.model.late = nn.Parameter(torch.zeros(3))
        sw.request("dp2")
        return [end[1:] for end in until_ended(sw, books)]

    for ((outcome, reason),) in everywhere(2, work):
        assert outcome == "aborted"
        assert "late: added or replaced after build" in reason


@pytest.mark.parametrize("careless", [torch.manual_seed, random.seed, np.random.rand])
def test_a_build_that_touches_the_random_streams_is_refused(careless):
    def work(world):
        def build(mesh, layout):
            careless(3)
            return build_net(mesh, layout)

        try:
            switcher(world, build, "dp1", initial=lambda *_: None)
        except UnknownStateError as error:
            return str(error)
        return ""

    assert "build seeds, or draws from" in everywhere(1, work)[0]
