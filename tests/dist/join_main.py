"""An agent that comes later, as a process of its own: ``python join_main.py RUN ENTRY RANKS LIVENESS_SECONDS``."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dynatrain.cluster.claim import Claim
from dynatrain.cluster.launch import join_agent
from dynatrain.observe.address import Address
from dynatrain.observe.prints import print_of
from dynatrain.observe.run import RunFolder

if __name__ == "__main__":
    path, entry, ranks, liveness = sys.argv[1:5]
    assert "torch" not in sys.modules, "the fork server starts before torch is imported"
    run = RunFolder(Path(path))
    address = Address.read(run.path)
    prints = {"code": os.environ.get("CODE", "c0"), "config": print_of([run.config.read_bytes()])}
    try:
        code = join_agent(
            run,
            entry,
            replace(address, secret=os.environ.get("TOKEN", address.secret)),
            Claim(
                place=os.environ.get("PLACE", "here"),
                host="h",
                pid=os.getpid(),
                devices=0,
                ranks=int(ranks),
                prints=prints,
            ),
            liveness_seconds=float(liveness),
            leave_seconds=1.0,
        )
    except ValueError as refused:
        sys.stderr.write(f"{refused}\n")
        code = 2
    sys.exit(code)
