"""The ranks of ``dynatrain train``, slowed down where a test wants to do something to them while they train."""

import os
import time

from dynatrain.train import rank
from dynatrain.train.trainer import Trainer

PACE = "TESTS_SECONDS_A_STEP"


def main(context):
    """Rank 0 waits before each step; the others wait for it."""
    pace, step = float(os.environ.get(PACE, "0")), Trainer._step
    if pace and context.rank == 0:

        def slowly(*given):
            time.sleep(pace)
            step(*given)

        Trainer._step = slowly
    rank.main(context)
