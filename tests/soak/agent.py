"""The command line with the ranks of the soak, and agents that lose patience soon: ``python agent.py COMMAND ...``."""

import os
import signal
import sys

import dynatrain.app.commands.join as join_module
import dynatrain.app.start as start_module
from dynatrain.app.main import main
from dynatrain.cluster import launch
from dynatrain.cluster.kernel import signal_me_when_parent_ends

ENTRY = "tests.soak.rank:main"

if __name__ == "__main__":
    signal_me_when_parent_ends(signal.SIGKILL)  # however the test ends
    start_module.start.__kwdefaults__["entry"] = join_module.ENTRY = ENTRY
    for run in (launch.run_agent, launch.join_agent):
        run.__kwdefaults__["liveness_seconds"] = float(os.environ["SOAK_PATIENCE"])
        run.__kwdefaults__["leave_seconds"] = 2.0
    assert "torch" not in sys.modules, "nothing before the agent may import torch"
    sys.exit(main())
