"""A switch that fails anywhere, on any rank, leaves the run as if it had not been tried."""

import functools
import gc
import time
from dataclasses import dataclass

import pytest
from tests.dist.trained import DoneError, shares, sit_down, summed, switcher, train
from tests.jobs import late
from tests.ledgers import registered_groups
from tests.ranks import run

from dynatrain.execute.memory import Nearest
from dynatrain.execute.transport import GroupTransport
from dynatrain.layout.text import print_layout

nearest = Nearest()

LAYOUTS = ("fsdp4", "dp2.fsdp2")
"""Training has equal bits in both, so that one run without any switch is the reference for all that follows."""

PHASES = (("build", -1), ("warm", -1), ("quiesce", -1), ("move", -1), ("bound", None), ("check", -1), ("commit", -1))
EVENTS = ("round_start", "posted", "received", "agreed")


class PlantedError(Exception):
    pass


@dataclass
class Case:
    """A fault: raise on ``victim`` when ``event`` of ``number`` comes (a round is counted from the last if below 0)."""

    event: str
    number: int | None
    victim: int
    mode: str
    after: int = 0
    fired: int = 0


ROUNDS = {("keep", 0): 5, ("tight", 0): 3, ("keep", 2): 6, ("tight", 2): 3}
"""By mode, and whether the switch is inside a step: then there are gradients, too."""


def points(rounds):
    """Where an attempt can fail: each phase, and each event of the given rounds."""
    return [*PHASES, *((event, number) for number in rounds for event in EVENTS)]


BREATH = 0.05
"""Seconds after each step, for the thread that prepares a switch: hundreds of steps would pass meanwhile, and each has
to be compared with the reference's."""


class Director:
    """Plays cases one after the other: a disturbed switch, two steps, the same switch undisturbed, the next case."""

    def __init__(self, world, script, transport):
        self.rank, self.script = world.rank, list(script)
        self.store = world.store
        self.ends, self.steps, self.verdicts, self.keys = [], [], [], []
        self.case, self.armed, self.quiet_steps = None, False, 0
        self.sw = switcher(world, LAYOUTS[0], hook=self.hook, transport=transport)
        original = self.sw._course._finish

        def finish(attempt, outcome, reason, told=None):
            self.ends.append((outcome, reason))
            original(attempt, outcome, reason, told)

        self.sw._course._finish = finish

    def hook(self, event, number, _switch):
        case = self.case
        if not self.armed or self.rank != case.victim or event != case.event or case.fired:
            return
        rounds, wanted = len(self.sw._course._attempt._schedule.rounds) if event in EVENTS else 0, case.number
        assert rounds in {0, ROUNDS[case.mode, case.after]}
        if rounds and wanted < 0:
            wanted += rounds
        if wanted in {None, number}:
            case.fired += 1
            raise PlantedError(event)

    def books(self):
        """What must be as before after an abort."""
        return self.sw._party.memory.held, registered_groups(), gc.isenabled(), gc.get_freeze_count()

    def after_step(self, result):
        if self.sw._course._attempt is not None:
            time.sleep(BREATH)
        self.steps.append((result.loss, result.grad_norm, shares(self.sw, self.rank)))
        if self.ends:
            self.ended(*self.ends.pop())
        elif self.quiet_steps:
            self.quiet_steps -= 1
            for (
                attempt
            ) in self.sw._course._abandoned:  # what they made is freed at the step edge after their threads' end
                attempt.join(10)
            if not self.quiet_steps:
                self.verdicts[-1].append(self.books())
                self.keys.append(self.store.num_keys())
                self.ask()
        elif self.case is None:
            self.next_case()

    def next_case(self):
        if not self.script:
            raise DoneError
        self.case, self.armed = self.script.pop(0), True
        self.before = self.books()
        self.ask()

    def ask(self):
        other = next(text for text in LAYOUTS if text != print_layout(self.sw.layout))
        self.sw.request(other, mode=self.case.mode, after=self.case.after)

    def ended(self, outcome, reason):
        if self.armed:
            self.armed = False
            self.verdicts.append([self.case, outcome, reason, self.before])
            self.quiet_steps = 4
        else:
            self.verdicts[-1] += [outcome, reason]
            self.case = None


def play(script, seconds, transport=nearest):
    def work(world):
        sit_down(world)
        director = Director(world, script, transport)
        train(director.sw, director.after_step)
        return director.verdicts, director.steps, director.keys

    return run(4, work, seconds=seconds)


@functools.cache
def reference(steps, seconds=120):
    def work(world):
        sit_down(world)
        sw, found = switcher(world, LAYOUTS[0]), []
        train(sw, lambda result: found.append((result.loss, result.grad_norm, shares(sw, world.rank))), steps)
        return found

    return run(4, work, seconds=seconds)


def same_bits(disturbed, undisturbed):
    """The first step at which two runs differ, or None."""
    for step, (one, other) in enumerate(zip(zip(*disturbed, strict=True), zip(*undisturbed, strict=True), strict=True)):
        if {rank[:2] for rank in one} != {rank[:2] for rank in other}:
            return step, "loss or norm"
        sums = [summed(rank[2] for rank in ranks) for ranks in (one, other)]
        if sums[0] != sums[1]:
            return step, [key for key in sums[0] if sums[0][key] != sums[1][key]]
    return None


def judge(results):
    assert all(isinstance(result, tuple) for result in results), results
    for verdicts in zip(*(result[0] for result in results), strict=True):
        case, outcome, reason, before, after, *second = verdicts[0]
        where = f"{case}: {outcome}, {reason}, then {second}"
        assert [verdict[0].fired for verdict in verdicts] == [rank == case.victim for rank in range(4)], where
        assert {(verdict[1], verdict[2]) for verdict in verdicts} == {("aborted", reason)}, where
        assert f"rank {case.victim}: PlantedError: {case.event}" in reason, where
        assert all(verdict[3][0] == verdict[4][0] for verdict in verdicts), f"{where}: {before} became {after}"
        groups = [(verdict[3][1], verdict[4][1]) for verdict in verdicts]
        assert all(one >= other for one, other in groups), f"{where}: groups of each rank before and after: {groups}"
        assert all(verdict[4][2] for verdict in verdicts), f"{where}: the collector is off"
        # What the rank found frozen goes as it is freed; nothing else is frozen.
        assert all(verdict[4][3] <= verdict[3][3] for verdict in verdicts), f"{where}: {before} became {after}"
        assert second[0] == "committed", where
    # A few are in use at any moment; whatever an abort leaves behind would add up.
    assert max(max(result[2]) for result in results) < 30
    steps = [result[1] for result in results]
    enough = -(-len(steps[0]) // 100) * 100  # so that one reference serves runs that differ by some steps
    differs = same_bits(steps, [rank[: len(steps[0])] for rank in reference(enough)])
    assert differs is None, differs


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("keep", GroupTransport),
        ("tight", nearest),
        pytest.param("keep", nearest, marks=pytest.mark.sweep),
        pytest.param("tight", GroupTransport, marks=pytest.mark.sweep),
        pytest.param("keep", late, marks=pytest.mark.sweep),
        pytest.param("tight", late, marks=pytest.mark.sweep),
    ],
)
def test_a_raise_in_any_phase_and_the_last_round_leaves_the_old_world_with_equal_bits(mode, transport):
    script = [Case(*point, number % 4, mode) for number, point in enumerate(points((-1,)))]
    judge(play(script, 240, transport))


INSIDE = (("received", -1), ("check", -1))


@pytest.mark.sweep
@pytest.mark.parametrize("where", [INSIDE, points((0, -1))], ids=["some", "all"])
def test_a_raise_in_a_switch_inside_a_step_leaves_the_old_world_with_equal_bits(where):
    """The step ends in the old world, or its rest comes again: nothing is trained on twice, nothing left out."""
    faults = [(*point, number % 4, mode) for number, point in enumerate(where) for mode in ("keep", "tight")]
    judge(play([Case(*fault, after=2) for fault in faults], 240))


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_raise_on_every_rank_in_any_phase_and_every_round_leaves_the_old_world_with_equal_bits(mode):
    script = [Case(*point, victim, mode) for point in points(range(ROUNDS[mode, 0])) for victim in range(4)]
    judge(play(script, 1200))
