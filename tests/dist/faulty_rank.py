"""The ranks' entry of a run, with faults: ``faults.json`` in the run folder says which rank harms itself when."""

import json
import os
import signal
import time
from typing import Any

from tests.dist.trained import ROUND_BYTES, flip

from dynatrain.cluster.context import RankContext
from dynatrain.plan.schedule import STAGING_BYTES
from dynatrain.train import rank
from dynatrain.train.switcher import Switcher

FAULTS = "faults.json"
BUDGET = STAGING_BYTES + (33 << 10)
"""Several rounds in ``tight``."""
ROUNDS = {"keep": 7, "tight": 3}
"""Rounds of each switch."""


class _Faulty(rank._Progress):
    """Tells the agent first, then does what was planted at this point."""

    planted: list[dict[str, Any]]
    rank: int
    switchers: list[Switcher]

    def round_at(self, place: str) -> int:
        """The number of the ``first``, ``middle`` or ``last`` round of the switch that is under way."""
        schedule = self.switchers[0]._course._attempt._schedule
        assert len(schedule.rounds) == ROUNDS[schedule.mode], f"{len(schedule.rounds)} rounds in {schedule.mode}"
        return {"first": 0, "middle": len(schedule.rounds) // 2, "last": len(schedule.rounds) - 1}[place]

    def event(self, event: str, round_: int, switch: int) -> None:
        super().event(event, round_, switch)
        for fault in [f for f in self.planted if (f["event"], f["switch"], f["rank"]) == (event, switch, self.rank)]:
            if fault["round"] is None or round_ == self.round_at(fault["round"]):
                self.planted.remove(fault)
                if fault["signal"] == "flip":
                    flip(self.switchers[0]._course._attempt.new, "param", self.rank)
                else:
                    os.kill(os.getpid(), signal.Signals[fault["signal"]])
                    time.sleep(0.1)  # a stop takes a moment to reach all threads, and this one is to be here then


def _rounds(*args: Any, **given: Any) -> Switcher:
    """The run's ``Switcher``, with several rounds in both modes."""
    _Faulty.switchers = [Switcher(*args, **given | {"budget": BUDGET, "round_bytes": ROUND_BYTES})]
    return _Faulty.switchers[0]


def main(context: RankContext) -> None:
    """As :func:`dynatrain.train.rank.main`."""
    _Faulty.planted = json.loads((context.folder.path / FAULTS).read_text())
    _Faulty.rank = context.rank
    rank._Progress, rank.Switcher = _Faulty, _rounds
    rank.main(context)
