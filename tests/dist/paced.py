"""The ranks of ``dynatrain train``, slowed down where a test wants to do something to them while they train."""

import os
import signal
import time

from dynatrain.train import rank
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Trainer

PACE = "TESTS_SECONDS_A_STEP"
FALL = "TESTS_FALL"
"""``RANK PLACE``: that first rank ends by SIGKILL before its first ``step``, or before its last ``save``."""
CLING = "TESTS_CLING"
"""Whoever has left the world halts itself in place of ending."""
_MOMENT = 1.0  # seconds: for the others to come to that place, too


def main(context):
    """Rank 0 waits before each step; the others wait for it."""
    pace, step = float(os.environ.get(PACE, "0")), Trainer._step
    if pace and context.rank == 0:

        def slowly(*given):
            time.sleep(pace)
            step(*given)

        Trainer._step = slowly
    victim, _, place = os.environ.get(FALL, "").partition(" ")
    if victim == str(context.rank) and not context.joins:
        if place == "step":
            Trainer._step = _fall
        else:
            Switcher.save_now = _fall
    rank.main(context)
    if os.environ.get(CLING):
        os.kill(os.getpid(), signal.SIGSTOP)


def _fall(*_: object) -> None:
    time.sleep(_MOMENT)
    os.kill(os.getpid(), signal.SIGKILL)
