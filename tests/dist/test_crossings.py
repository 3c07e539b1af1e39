"""A run whose members come and go is the run that one process would have made: same samples, same state, to 1e-12."""

import contextlib
import json
import random
from itertools import pairwise

import pytest
import torch
from tests.crossings import SHALLOW, DoneError, Member, Stop, case_of, expected, travel
from tests.legs import legal_texts
from tests.walks import Scaler
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

from dynatrain.app.verify import check_switch
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.observe.run import RunFolder
from dynatrain.train.switcher import Switcher

LIMIT = 1e-12


def check(stops, found, losses):
    """What every member of a tour saw is the oracle's; nobody saw a step twice, and no step is missing."""
    assert all(isinstance(result, dict) for result in found), found
    told = {}
    for member, result in enumerate(found):
        first = next(number for number, stop in enumerate(stops) if member in stop.members)
        last = max(number for number, stop in enumerate(stops) if member in stop.members)
        assert sorted(set(result["generations"])) == list(range(first, last + 1)), (member, result["switches"])
        assert result["left"] == (last < len(stops) - 1)
        assert [switch[0] for switch in result["switches"]] == ["committed"] * (last - max(0, first - 1))
        assert all(switch[3] for switch in result["switches"]), result["switches"]
        numbers = [step[0] for step in result["steps"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for step, apart in zip(result["steps"], result["apart"], strict=True):
            assert abs(step[1] - losses[step[0]]) <= LIMIT
            assert {"param", "exp_avg", "exp_avg_sq", "step", "ema.shadow"} == apart.keys()
            assert max(apart.values()) <= LIMIT, (member, step[0], apart)
            assert told.setdefault(step[0], step[:5]) == step[:5]
    assert sorted(told) == list(range(len(told)))
    for step, one in told.items():
        given = {sample for result in found for seen in result["steps"] if seen[0] == step for sample in seen[5]}
        assert given == set(one[4])


def test_members_come_and_go_and_the_run_is_the_oracles(tmp_path):
    """Growth, a leaver in the middle, rank 0 that leaves as another comes: all to the oracle's bits but the last."""
    stops = (Stop("fsdp2", (0, 1)), Stop("fsdp3", (0, 1, 2)), Stop("fsdp2", (0, 2)), Stop("tp2", (2, 3), "tight"))
    folder = RunFolder.create(tmp_path / "run", config="", environment={})
    case = case_of(30, shape=SHALLOW)
    losses, visits = expected(case)

    found = travel(case, stops, visits, folder=folder)

    check(stops, found, losses)
    for number, (one, other) in enumerate(pairwise(stops), 1):
        record = json.loads((folder.switch(number) / "certificate.json").read_text())
        assert record["world"] == {"old": len(one.members), "new": len(other.members)}
        assert (record["generation"], record["outcome"], record["cause"]["verb"]) == (number, "committed", "scale")
        assert (record["from"], record["to"]) == tuple(print_layout(parse_layout(stop.layout)) for stop in (one, other))
        assert check_switch(folder.switch(number)).problems == ()


class Scaled(nn.Linear):
    """A module with extra state: how often it was run."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"runs": self.runs}

    def set_extra_state(self, state):
        self.runs = state["runs"]


def build_scaled(mesh, layout):  # noqa: ARG001 - the user's own build needs the mesh alone
    model = fully_shard(Scaled(6, 8), mesh=mesh["fsdp"])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Loop(Member):
    """A loop of the user's own: all that is no tensor has to come to its newcomers."""

    def begin(self, world, case, **more):  # noqa: ARG002 - what the built-in trainer needs
        self.scaler = Scaler()
        self.sw = Switcher(
            build_scaled,
            layout=self.stops[self.worlds.generation].layout,
            worlds=self.worlds,
            state={"scaler": self.scaler, "schedule": lambda optimizer: StepLR(optimizer, 1, 0.5)},
            recorder=self.books,
            deadline=15.0,
            data_parallel="free",
            **more,
        )
        self.found["told"] = []

    def run(self):
        with contextlib.suppress(DoneError):
            for step in self.sw.steps(until=self.steps):
                self.sw.model(torch.full((2, 6), step + 1.0)).sum().backward()
                self.sw.optimizer.step()
                self.sw.optimizer.zero_grad()
                self.sw.state["schedule"].step()
                self.sw.optimizer.counted = getattr(self.sw.optimizer, "counted", 0) + 1
                self.scaler.streak += 1
                rate = self.sw.optimizer.param_groups[0]["lr"]
                counts = (self.scaler.streak, self.sw.model.runs, self.sw.optimizer.counted)
                self.found["told"].append((step, self.sw.generation, rate, *counts))
                self.note()
                self.go_on()
        return self.found | {"switches": self.books.switches}


def test_what_is_no_tensor_comes_to_newcomers_of_a_loop_of_ones_own():
    found = travel(case_of(40), (Stop("fsdp2", (0, 1)), Stop("fsdp4", (1, 2, 0, 3))), (), member=Loop)

    told = [{one[0]: one for one in result["told"]} for result in found]
    assert {one[1] for one in told[0].values()} == {0, 1}
    for step, one in told[0].items():
        assert one == (step, one[1], 0.1 * 0.5 ** (step + 1), 3 + step + 1, step + 1, step + 1)
        assert all(other[step] == one for other in told if step in other)
    assert all(result["switches"][0][0] == "committed" for result in found)
    assert {step for step, one in told[0].items() if one[1]} == told[2].keys() == told[3].keys()


def stops_of(seed, count, most=4):
    """A tour over worlds of random sizes and layouts; in each crossing somebody goes or comes, or both."""
    generator, members, coming = random.Random(seed), [0, 1], 2
    stops = []
    for _ in range(count):
        text = generator.choice(legal_texts(len(members), micro_batches=4))
        stops.append(Stop(text, tuple(members), generator.choice(("keep", "tight"))))
        going = generator.sample(members, generator.randrange(len(members)))
        stayers = [member for member in members if member not in going]
        fewest = 0 if going else 1
        comers = generator.randint(fewest, most - len(stayers)) if most > len(stayers) else 0
        if not going and not comers:
            stayers.pop()
        members = [*stayers, *range(coming, coming + comers)]
        coming += comers
    return tuple(stops)


FOUR = (
    Stop("fsdp2.tp2", (0, 1, 2, 3)),
    Stop("dp2", (0, 3), "tight"),
    Stop("pp2.fsdp2", (0, 3, 4, 5)),
    Stop("tp2", (4, 5)),
    Stop("dp2.tp2", (4, 5, 6, 7), "tight"),
)


@pytest.mark.sweep
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stops", [FOUR, *(stops_of(seed, 5) for seed in (1, 2, 3, 4))], ids=str)
def test_any_mix_of_axes_and_members_is_the_oracles_run(stops):
    case = case_of(60)
    losses, visits = expected(case)

    check(stops, travel(case, stops, visits, 200), losses)


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_nothing_grows_over_ten_crossings():
    small, stops = (0, 1), [Stop("fsdp2", (0, 1))]
    for comer in range(2, 7):
        stops += [Stop("fsdp3", (*small, comer)), Stop("fsdp2", small)]
    case = case_of(110)
    losses, visits = expected(case)

    found = travel(case, tuple(stops), visits, 250)

    check(stops, found, losses)
    for member in small:
        _, _, early, *between, late = found[member]["books"]
        # Votes under way while they are counted differ by a few; a key that stays, by one each crossing.
        assert late.pop("keys") - early.pop("keys") < len(between)
        assert late == early
