"""An agent as a process of its own: ``python agent_main.py RUN ENTRY RANKS LIVENESS_SECONDS``."""

import os
import sys
from pathlib import Path

from dynatrain.cluster.launch import run_agent
from dynatrain.observe.run import RunFolder

MOST = 6


def resize(_: str, size: int, named: str) -> str:
    """Data parallel to six ranks."""
    if size > MOST:
        raise ValueError(f"{size} ranks: at most {MOST}; nearest: {MOST}")
    return named or f"dp{size}"


if __name__ == "__main__":
    path, entry, ranks, liveness = sys.argv[1:5]
    assert "torch" not in sys.modules, "the fork server starts before torch is imported"
    if os.environ.get("RANK", "0") == "0" and not RunFolder(Path(path)).exists:
        RunFolder.create(Path(path), config="", environment={})
    sys.exit(
        run_agent(
            RunFolder(Path(path)),
            entry,
            int(ranks),
            "auto",
            liveness_seconds=float(liveness),
            grace_seconds=float(os.environ.get("GRACE", "0")),
            leave_seconds=1.0,
            prints={"code": "c0"},
            spares=int(os.environ.get("SPARES", "0")),
            layout=f"dp{ranks}",
            resize=resize,
        )
    )
