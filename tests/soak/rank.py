"""The ranks of a soaked run: ``armed.json`` in the run folder says what is done to whom, and at which place.

Whoever comes to that place, and is the one who is to do it, takes the file away, so that it is done once.
"""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.soak.cut import cut

from dynatrain.cluster.context import RankContext
from dynatrain.train import rank
from dynatrain.train.party import ENDS, PHASES
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Trainer

ARMED, FIRED = "armed.json", "fired.json"
PACE = "SOAK_SECONDS_A_STEP"
HERE = 0.15
"""Seconds: a stop takes a moment to reach all threads, and whoever cuts its own links is to be heard of no more."""


class _Faulty(rank._Progress):
    """Tells the agent first, then does what was planted at this point."""

    folder: Path
    switchers: list[Switcher]
    joins: bool

    def event(self, event: str, round_: int, switch: int) -> None:
        super().event(event, round_, switch)
        if event in PHASES:
            self.at(event)
        elif event in ENDS and event == "committed":
            _Faulty.joins = False

    @classmethod
    def at(cls, phase: str) -> None:
        """This rank is at ``phase``: do what is to be done there."""
        path = cls.folder / ARMED
        if not path.exists():
            return
        with suppress(OSError, ValueError):  # another has taken it
            fault = json.loads(path.read_text())
            if cls._is_meant(fault, phase):
                path.rename(claimed := path.with_suffix(f".{os.getpid()}"))
                claimed.unlink()
                cls._do(fault)

    @classmethod
    def _is_meant(cls, fault: dict[str, Any], phase: str) -> bool:
        if fault["phase"] != phase:
            return False
        if fault["victim"] == "new":
            return cls.joins
        if cls.joins:
            return False
        return cls.switchers[0].rank == (fault["rank"] if fault["victim"] == "old" else 0)

    @classmethod
    def _do(cls, fault: dict[str, Any]) -> None:
        pids = fault["pids"] or [os.getpid()]
        told = fault | {"pid": pids[0], "by": os.getpid(), "time": time.time()}
        (cls.folder / FIRED).with_suffix(".new").write_text(json.dumps(told))
        (cls.folder / FIRED).with_suffix(".new").rename(cls.folder / FIRED)
        if fault["kind"] == "cut":
            cut(pids)
        else:
            os.kill(pids[0], signal.SIGKILL if fault["kind"] == "kill" else signal.SIGSTOP)
        time.sleep(HERE)


def _switcher(*args: Any, **given: Any) -> Switcher:
    _Faulty.switchers = [Switcher(*args, **given)]
    return _Faulty.switchers[0]


def main(context: RankContext) -> None:
    """As :func:`dynatrain.train.rank.main`."""
    _Faulty.folder, _Faulty.joins, _Faulty.switchers = context.folder.path, context.joins, []
    pace, step, job = float(os.environ.get(PACE, "0")), Trainer._step, rank.job_of

    def slowly(self: Trainer, number: int) -> None:
        if self.switcher.rank == 0:
            time.sleep(pace)
        _Faulty.at("train")
        step(self, number)

    def starting(*given: Any) -> Any:
        if _Faulty.joins:
            _Faulty.at("train")
        return job(*given)

    rank._Progress, rank.Switcher, rank.job_of = _Faulty, _switcher, starting
    Trainer._step = slowly
    rank.main(context)
