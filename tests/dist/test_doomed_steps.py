"""The step whose switch is taken back at its commit leaves no trace, and comes again; hung builds are given up."""

import gc
import random
import threading

import numpy as np
import pytest
import torch
from tests.dist.foreign import Books, batch, build_net, everywhere, idle, switcher, until_ended
from tests.dist.test_switcher_state import Loop, equal
from tests.ledgers import registered_groups
from torch.nn import functional

from dynatrain.train.retire import RetiredHandleError

STEPS = 10


class PlantedError(Exception):
    pass


class DoomedLoop(Loop):
    """Draws from every process-wide generator in each step, and remembers the handles of the doomed one."""

    def __init__(self, world, tour, mode, event):
        super().__init__(world, tour, mode)
        self.fired, self.doomed, self.event = 0, [], event
        self.sw._party.hook = self.hook

    def hook(self, event, _round, switch):
        if (event, switch, self.rank) == (self.event, 1, 1):
            self.fired += 1
            raise PlantedError(event)

    def run(self):
        log = []
        for step in self.sw.steps(until=STEPS):
            at_start = self.state()
            net, optimizer = self.sw.model, self.sw.optimizer
            before = [p.detach().to_local().clone() for p in net.parameters()]
            optimizer.zero_grad()
            inputs, targets = batch(step, self.rank)
            drawn = torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002 - the process-wide one
            loss = functional.mse_loss(net(inputs) * (1 + drawn), targets)
            loss.backward()
            optimizer.step()
            if self.sw.doomed:
                unchanged = all(map(torch.equal, before, (p.detach().to_local() for p in net.parameters())))
                self.doomed.append((step, unchanged, net, optimizer))
            self.sw.state["lr"].step()
            for shadow in (self.local, self.shared):
                shadow.update(net)
            self.scaler.update()
            self.calls.clear()
            if not self.sw.doomed:
                log.append((step, loss.item(), at_start, self.state()))
        return log

    def late_uses(self):
        """What using the doomed step's handles says."""
        _, _, net, optimizer = self.doomed[0]
        said = []
        for use in (lambda: net(batch(0, 0)[0]), optimizer.step):
            with pytest.raises(RetiredHandleError) as caught:
                use()
            said.append(str(caught.value))
        return said


def seeded(world):
    random.seed(world.rank)
    np.random.seed(world.rank)  # noqa: NPY002
    torch.manual_seed(world.rank)


@pytest.mark.parametrize(
    ("event", "mode"),
    [
        ("check", "tight"),
        ("commit", "keep"),
        pytest.param("check", "keep", marks=pytest.mark.sweep),
        pytest.param("commit", "tight", marks=pytest.mark.sweep),
    ],
)
def test_a_step_that_is_taken_back_changes_nothing_and_comes_again_on_the_old_objects(mode, event):
    def work(world):
        seeded(world)
        loop = DoomedLoop(world, {3: "dp2", 7: "dp2"}, mode, event)
        log = loop.run()
        doomed = [entry[:2] for entry in loop.doomed]
        return log, loop.books.ends, loop.fired, doomed, loop.late_uses()

    def plain(world):
        seeded(world)
        return DoomedLoop(world, {}, mode, event).run()

    disturbed, undisturbed = everywhere(2, work, 90), everywhere(2, plain)
    assert [result[2] for result in disturbed] == [0, 1]
    for (log, ends, _, doomed, said), expected in zip(disturbed, undisturbed, strict=True):
        assert [end[1] for end in ends] == ["aborted", "committed"]
        assert f"rank 1: PlantedError: {event}" in ends[0][2]
        assert doomed == [(3, True)]
        assert all("belongs to switch 1 to dp2, which was aborted" in words for words in said)
        assert [entry[0] for entry in log] == list(range(STEPS))
        for step in range(7):
            assert log[step][1] == expected[step][1], f"step {step}"
            for when in (2, 3):
                assert equal(log[step][when], expected[step][when]) == [], f"step {step}"
        for step in range(7, STEPS):
            assert log[step][1] == pytest.approx(expected[step][1], rel=0, abs=1e-12)


def test_a_build_that_hangs_on_one_rank_is_given_up_and_does_no_harm_when_it_ends_late():
    def work(world):
        go_on, books, builds = threading.Event(), Books(), []

        def build(mesh, layout):
            builds.append(layout)
            if len(builds) == 3 and world.rank == 1:  # before it come that of the first layout and its rehearsal
                go_on.wait(30)
            return build_net(mesh, layout)

        sw = switcher(world, build, "fsdp2", recorder=books, deadline=3.0)
        before = (sw._party.memory.held, registered_groups())
        ends, seen = [], []
        for _ in range(2):  # the second one while the thread of the first one hangs
            sw.request("dp2")
            ends += until_ended(sw, books)
            seen.append((sw._party.memory.held, registered_groups()))
        hung = [thread for thread in threading.enumerate() if thread.name == "switch-1"]
        go_on.set()
        for thread in hung:
            thread.join(10)
        for _ in idle(sw, 2):
            pass
        after = (sw._party.memory.held, registered_groups())
        inputs, _ = batch(0, world.rank)
        sw.model(inputs).sum().backward()
        return [end[1:] for end in ends], before, seen, after, len(hung), sw._course._abandoned, gc.isenabled()

    results = everywhere(2, work)
    assert [result[4] for result in results] == [0, 1]
    for ends, before, (given_up, committed), after, _, abandoned, collects in results:
        assert [outcome for outcome, _ in ends] == ["aborted", "committed"]
        assert "late ranks [1] after 3" in ends[0][1]
        assert given_up == before
        assert after == committed
        assert (abandoned, collects) == ([], True)
