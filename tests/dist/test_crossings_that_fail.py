"""A crossing that fails before its commit, in a newcomer or in a stayer, leaves the old world with equal bits."""

import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest
from tests.crossings import SHALLOW, STEPS_EACH, DoneError, Member, Stop, case_of, travel

from dynatrain.train import groups

OLD = (0, 1)
PLACES = (("build", -1), ("warm", -1), ("quiesce", -1), ("received", 0), ("bound", None), ("check", -1), ("commit", -1))
QUIET = 2
"""Steps after each aborted crossing before the next one is asked for."""


class PlantedError(Exception):
    pass


@dataclass(frozen=True)
class Fault:
    """What happens to a holder of the crossing: it raises where ``event`` of ``number`` comes, or dies there."""

    event: str
    number: int | None
    holder: int
    dies: bool = False
    mode: str = "keep"


class Tried(Member):
    """A member of a world into which newcomers come one after the other, each in vain."""

    def __init__(self, world, case, stops, visits, faults=(), **more):
        self.faults, self.quiet = faults, 0
        super().__init__(world, case, stops, visits, hook=self.hook, **more)

    def hook(self, event, number, switch):
        if event in {"aborted", "committed", "failed"} or switch > len(self.faults):
            return
        fault = self.faults[switch - 1]
        victim = self.member if self.member in OLD else len(OLD)
        if victim == fault.holder and event == fault.event and fault.number in {None, number}:
            if fault.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise PlantedError(event)

    def go_on(self):
        ended = len(self.books.switches)
        if ended == len(self.found["books"]):
            self.found["books"].append(self.sw._party.memory.held)
            self.quiet = QUIET
        self.quiet -= 1
        if self.quiet >= 0:
            return
        if ended == len(self.faults):
            raise DoneError
        self.ask(ended + 1)


def aborted(faults, steps, deadline, seconds=150):
    """Each fault in its own crossing of one run; what its members saw, and the same run without any crossing."""
    stops = [Stop("fsdp2", OLD)]
    stops += [Stop("fsdp3", (*OLD, 2 + number), fault.mode) for number, fault in enumerate(faults)]
    case = case_of(steps, shape=SHALLOW)
    found = travel(case, tuple(stops), (), seconds, member=Tried, deadline=deadline, faults=faults)
    return found, travel(case, (Stop("fsdp2", OLD),), (), seconds, member=Undisturbed, size=2)


class Undisturbed(Member):
    """The same run without any crossing."""

    def go_on(self):
        pass


class Forsaken(Member):
    """A member of a world whose first newcomer falls when it has come to make a group, and has not connected."""

    def __init__(self, world, *given, **more):
        if world.rank == len(OLD):
            groups.named_group = lambda *_: self.fall()
        super().__init__(world, *given, **more)
        if world.rank == 0:
            threading.Thread(target=self.watch, daemon=True).start()

    def fall(self):
        self.worlds.requests.post("fell", "")
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(self):
        """What the newcomer's agent does."""
        while self.worlds.requests.peek("fell") is None:
            time.sleep(0.01)
        self.worlds.crossing(1, len(OLD) + 1).give_up(1, "planted: the newcomer is lost")

    def go_on(self):
        if self.sw.generation == len(OLD):
            raise DoneError
        if self.in_world >= STEPS_EACH:
            self.ask(1 + len(self.books.switches))


def check(faults, found, alone):
    for member in OLD:
        result, reference = found[member], alone[member]
        assert isinstance(result, dict), result
        steps = len(result["steps"])
        assert steps < len(reference["steps"])  # it saw all of its faults
        assert [step[:5] for step in result["steps"]] == [step[:5] for step in reference["steps"][:steps]]
        assert result["bits"] == reference["bits"][:steps]
        assert set(result["generations"]) == {0}
        assert len(set(result["books"])) == 1, result["books"]
        assert [switch[0] for switch in result["switches"]] == ["aborted"] * len(faults), result["switches"]
        for (_, reason, *_), fault in zip(result["switches"], faults, strict=True):
            assert (f"PlantedError: {fault.event}" in reason) != fault.dies, (fault, reason)
    for number, fault in enumerate(faults):
        newcomer = found[2 + number]
        if fault.event == "build" and fault.holder in OLD and isinstance(newcomer, RuntimeError):
            assert "did not come to make a group" in str(newcomer)  # an agent would not have let it wait so long
            continue
        assert newcomer is None if fault.dies and fault.holder == len(OLD) else "refused" in newcomer, (fault, newcomer)


def test_who_falls_between_coming_to_a_group_and_connecting_does_not_hold_up_the_next_crossing():
    stops = (Stop("fsdp2", OLD), Stop("fsdp3", (*OLD, 2)), Stop("fsdp3", (*OLD, 3)))

    found = travel(case_of(20, shape=SHALLOW), stops, (), 60, member=Forsaken, deadline=15.0)

    assert found[2] is None
    for member in OLD:
        told = [switch[:2] for switch in found[member]["switches"]]
        assert told[0] == ("aborted", "planted: the newcomer is lost")
        assert told[1] == ("committed", "")
    assert {*found[3]["generations"]} == {2}


@pytest.mark.sweep
def test_a_newcomer_or_a_stayer_that_raises_leaves_the_old_world_with_equal_bits():
    faults = (Fault("received", 0, 2), Fault("check", -1, 1))
    check(faults, *aborted(faults, 20, 15.0))


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["keep", "tight"])
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_a_raise_anywhere_leaves_the_old_world_with_equal_bits(mode, holder):
    faults = tuple(Fault(*place, holder, mode=mode) for place in PLACES)
    check(faults, *aborted(faults, 70, 15.0, 280))


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_newcomer_that_is_killed_anywhere_leaves_the_old_world_with_equal_bits():
    faults = tuple(Fault(*place, 2, dies=True) for place in PLACES)
    check(faults, *aborted(faults, 70, 5.0, 280))
