"""Entry functions for tests of the agent: ranks that "train" by all-reducing, and ranks that misbehave."""

import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from dynatrain.cluster.context import RankContext
from dynatrain.cluster.seat import Seat, take_seat
from dynatrain.observe.requests import Answer

HELPER = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("helper", flush=True)
time.sleep(600)
"""
STEPS = 100_000  # until somebody stops it


def _tell(**facts: object) -> None:
    """One line in the rank's log."""
    sys.stdout.write(json.dumps(facts) + "\n")


def _join(seat: Seat) -> None:
    dist.init_process_group(
        seat.context.backend, store=seat.store, rank=seat.context.rank, world_size=seat.context.world_size
    )


def _loop(seat: Seat, steps: int) -> None:
    """Train until ``steps`` or until a stop request, at whose agreed edge every rank leaves."""
    rank, board = seat.context.rank, seat.board
    seen, stop = 0, None
    for step in range(1, steps + 1):
        seat.heart.at(step=step, phase="train")
        one = torch.ones(4)
        dist.all_reduce(one)
        assert one[0] == seat.context.world_size
        time.sleep(0.005)
        while seen < board.news():
            request = json.loads(board.read(seen) or '{"verb": "none"}')
            if request["verb"] == "stop":
                stop = seen
                board.ready(1, rank, step)
            elif rank == 0:
                board.answer(seen, Answer(outcome="unchanged", message=request["arguments"]["layout"]).to_json())
            seen += 1
        go = board.go_edge(1) if stop is not None else None
        if go is not None and go.edge == step:
            board.answer(stop, Answer(outcome="done", message=f"at {step}").to_json())
            break
    _tell(left_at=step)
    seat.heart.at(step=step, phase="end")
    dist.barrier()


def train(context: RankContext) -> None:
    """Until stopped."""
    with take_seat(context) as seat:
        _join(seat)
        _loop(seat, STEPS)


def short(context: RankContext) -> None:
    """Five steps."""
    with take_seat(context) as seat:
        _join(seat)
        _loop(seat, 5)


def raises(context: RankContext) -> None:
    """Rank 1 raises at once inside its seat; the others wait for it in a collective."""
    with take_seat(context) as seat:
        _join(seat)
        dist.barrier()
        if context.rank == 1:
            seat.heart.at(step=7, phase="move", switch=3)
            raise ValueError("planted: no such layout")
        dist.barrier()


def leaves(context: RankContext) -> None:
    """Rank 1 ends well, and the others go on without it."""
    with take_seat(context):
        if context.rank != 1:
            time.sleep(600)


def stubborn(context: RankContext) -> None:
    """Never looks at the board, ignores SIGTERM, and keeps a helper that does the same."""
    with take_seat(context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with subprocess.Popen([sys.executable, "-c", HELPER]):
            time.sleep(600)


def orphan_maker(context: RankContext) -> None:
    """Rank 0 dies and leaves a helper in a session of its own."""
    with take_seat(context):
        if context.rank == 0:
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            _tell(helper=helper.pid)
            sys.stdout.flush()
            os._exit(9)
        time.sleep(600)


def notices(context: RankContext) -> None:
    """Writes down what a rank's process is like."""
    with take_seat(context):
        _tell(
            sid=os.getsid(0),
            pid=os.getpid(),
            scheduling=os.sched_getscheduler(0),
            env=[k for k in os.environ if k in {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}],
            context=context.to_json(),
        )


def silent(_: RankContext) -> None:
    """Never sits down."""
    time.sleep(600)
