"""The ranks of ``dynatrain train``; one that has left the run halts itself instead of ending."""

import os
import signal

from tests.dist import paced


def main(context):
    """Returns only where a rank has left: a run that is stopped raises."""
    paced.main(context)
    os.kill(os.getpid(), signal.SIGSTOP)
