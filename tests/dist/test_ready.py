"""A layout that is prepared ahead: a switch to it builds nothing, and what it holds is told, counted and freed."""

import pytest
from tests.dist.foreign import Books, Scaler, everywhere
from tests.dist.test_switcher_state import Loop, equal
from tests.ledgers import registered_groups

BUILT = ["build", "warm"]


class Told(Books):
    """A recorder that also keeps what it is told of layouts that are ready."""

    def __init__(self):
        super().__init__()
        self.readied = []

    def ready(self, layout, held):
        self.readied.append((layout, held))


class Ahead(Loop):
    """A loop that can train until something has come about, at one step on all ranks."""

    def __init__(self, world, mode="keep"):
        self.told, self.events = Told(), []
        super().__init__(
            world, {}, mode, recorder=self.told, hook=lambda event, _, number: self.events.append((number, event))
        )
        self.log = []

    def until(self, come, most=5000):
        for _ in range(most):
            self.log += self.run(self.sw.step + 1)[0]
            if come():
                return
        raise AssertionError((self.told.readied, self.told.ends))

    def prepare(self, layout, **more):
        self.sw.prepare(layout, **more)
        self.until(lambda: self.sw.ready == layout)

    def switch(self, layout, **more):
        ends = len(self.told.ends)
        self.sw.request(layout, **more)
        self.until(lambda: len(self.told.ends) > ends)

    def phases(self, number):
        return [event for its, event in self.events if its == number]

    def counts(self):
        return self.sw._party.memory.held, registered_groups()


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_switch_to_what_is_ready_builds_nothing_and_loses_no_bit(mode):
    def work(world):
        loop = Ahead(world, mode)
        loop.until(lambda: True)
        before = loop.counts()
        loop.prepare("dp2")
        held = loop.counts()[0] - before[0]
        for _ in range(4):
            loop.until(lambda: True)
        at = loop.sw.step
        loop.switch("dp2")
        took = loop.sw.step - at
        first = loop.told.readied[0]
        return loop.log, loop.told.ends, first, held, [loop.phases(number) for number in (1, 2)], took, loop.sw.ready

    results = everywhere(2, work)
    steps = len(results[0][0])
    plain = everywhere(2, lambda world: Loop(world, {}).run(steps)[0])
    told = results[0][2]
    assert told[0] == "dp2"
    for rank, (log, ends, first, held, (ahead, after), took, ready) in enumerate(results):
        assert [end[:2] for end in ends] == [("dp2", "committed")]
        assert ahead == [*BUILT, "ready"]
        assert not set(BUILT) & set(after)
        assert after[-1] == "committed"
        assert took <= 4
        assert first == told
        assert held == told[1][rank] > 0
        assert ready == ""
        for step, (loss, at_start, _, _) in enumerate(log):
            assert step == 0 or equal(at_start, log[step - 1][2]) == [], f"step {step}"
            assert loss == pytest.approx(plain[rank][step][0], rel=0, abs=1e-12)


def test_what_is_ready_is_freed_by_whatever_makes_it_useless():
    def work(world):
        loop, found = Ahead(world), []
        loop.until(lambda: True)
        before = loop.counts()
        for useless in (
            lambda: loop.sw.prepare("fsdp2"),  # the present one
            lambda: loop.switch("dp2", mode="tight"),
            lambda: (loop.prepare("fsdp2"), loop.sw.prepare("fsdp2"), loop.switch("fsdp2")),
            lambda: (loop.sw.park(), loop.sw.unpark()),
            lambda: loop.sw.register("late", Scaler()),
        ):
            if loop.sw.layout.size("fsdp") == 2:
                loop.prepare("dp2")
            held = loop.counts()[0]
            useless()
            loop.until(lambda: not loop.sw.ready)
            found.append((held, loop.told.readied[-1], loop.counts()))
        return before, found, loop.told.ends

    for before, found, ends in everywhere(2, work, 90):
        assert {end[1] for end in ends} == {"committed"}
        assert [end[0] for end in ends[:2]] == ["dp2", "fsdp2"]
        assert {told for _, told, _ in found} == {("", ())}
        assert all(held > before[0] for held, _, _ in found)
        assert found[0][2] == before
        switched = found[2][2]  # back in the first layout, whose groups and those of the other are kept
        assert switched[0] == before[0]
        assert found[3][2] == found[4][2] == switched


def test_what_cannot_be_prepared_is_said_and_costs_nothing():
    def work(world):
        loop = Ahead(world)
        with pytest.raises(ValueError, match="dp3"):
            loop.sw.prepare("dp3")
        with pytest.raises(ValueError, match="keep"):
            loop.sw.prepare("dp2", mode="kep")
        return loop.run(3)

    everywhere(2, work)
