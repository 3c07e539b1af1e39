"""A switch that is decided at the edge of its own step neither hangs nor is given up."""

import time

import torch.distributed as dist
from tests.jobs import everywhere
from tests.walks import Walker

from dynatrain.cluster.board import Board


class SlowBoard(Board):
    """Its decisions come when the other ranks have looked and gone on to their step."""

    def decide(self, topic, value):
        if topic.startswith("turn/"):
            time.sleep(0.3)
        return super().decide(topic, value)


def switch_late(world):
    board = SlowBoard(dist.PrefixStore("slow", world.store), world.size)
    walker = Walker(world, "fsdp2", board=board, deadline=5.0)
    return walker.go("tp2", at=1)


def test_a_rank_waits_for_a_promised_step_only_once_all_ranks_know_of_it():
    assert [book["outcome"] for book in everywhere(2, switch_late, 40)] == ["committed"] * 2
