"""Whoever waits in a collective comes out of it when the alarm rings: its peers are gone, halted or merely late."""

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dynatrain.cluster.alarm import Alarm, put_up
from dynatrain.cluster.summons import Summons
from dynatrain.execute.transport import sever
from dynatrain.train.survival import Survival

pytestmark = pytest.mark.clock

SECONDS = 20.0
LOSS = Summons(generation=1, old=(0, 1, 2), new=(0, 1), newcomers=(), layout="dp2", lost=(2,), why="planted")


def groups(size):
    """The ends of one group, all in this process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, made = dist.HashStore(), [None] * size

    def make(rank):
        made[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=600))

    side_by_side(make, range(size))
    return made


def side_by_side(work, items):
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "somebody is still inside"


COLLECTIVES = {
    "all_reduce": lambda group: group.allreduce([torch.ones(1 << 12)]),
    "all_gather": lambda group: group.allgather(
        [[torch.empty(1 << 12) for _ in range(group.size())]], [torch.ones(1 << 12)]
    ),
    "receive": lambda group: group.recv([torch.empty(4)], 2, 0),
    "large": lambda group: group.allreduce([torch.ones(1 << 22)]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_all_who_wait_for_one_that_never_comes_are_out_at_once(name):
    one, other, _never = made = groups(3)
    raised, began = [], []

    def wait(group):
        with pytest.raises(RuntimeError) as error:
            COLLECTIVES[name](group).wait()
        raised.append((time.monotonic() - began[0], str(error.value)))

    def close(group):
        time.sleep(0.2)
        began.append(time.monotonic())
        sever(group)

    side_by_side(lambda work: work[0](work[1]), [(wait, one), (wait, other), (close, one), (close, other)])

    assert len(raised) == 2
    assert all(seconds < SECONDS / 4 for seconds, _ in raised), raised
    with pytest.raises(RuntimeError):
        COLLECTIVES[name](made[0]).wait()  # and nobody gets in any more


def test_the_alarm_releases_first_and_then_tells_and_hears_of_each_loss_once():
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    run, heard = dist.PrefixStore("run", server), []
    alarm = Alarm(run, joins=False)
    put_up(run, LOSS)  # before it is armed
    alarm.arm(lambda: heard.append(alarm.beyond(0)))
    assert alarm.wait(0, SECONDS) == LOSS
    assert heard == [None]
    assert alarm.beyond(1) is None
    assert (alarm.words(0), alarm.words(1)) == ("lost: planted", "")
    second = Summons.from_json(LOSS.to_json()).at("asked")
    put_up(run, second)
    end = time.monotonic() + SECONDS
    while len(heard) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert heard == [None, LOSS]
    assert Alarm(run, joins=True).wait(0, 0.0) is None  # a newcomer's begins with the next


def test_an_error_of_a_collective_is_no_mistake_of_the_loop_before_the_agents_must_have_told_of_a_loss():
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    run = dist.PrefixStore("run", server)
    alarm = Alarm(run, joins=False, notice=SECONDS)
    alarm.arm(lambda: None)
    # A switch's deadline is short, and the machine that is gone is missed by its silence alone.
    party = SimpleNamespace(worlds=SimpleNamespace(alarm=alarm), generation=0, patience=0.1)
    threading.Timer(0.6, put_up, (run, LOSS)).start()
    assert Survival(party).broken_by(RuntimeError("gloo: Connection closed by peer"))
    assert not Survival(party).broken_by(ValueError("the loop's own"))
