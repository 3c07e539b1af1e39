"""What a loop writes while it is copied, or digested, as the state of one moment: told by name, or put back in time."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, batch, build_net, everywhere, switcher, whole
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dynatrain.train import snapshot
from dynatrain.train.agreement import SwitchFailedError
from dynatrain.train.saving import Saves


def train(sw, step, rank):
    inputs, targets = batch(step, rank)
    functional.mse_loss(sw.model(inputs), targets).backward()
    sw.optimizer.step()
    sw.optimizer.zero_grad()


def by_copy(params, values):
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def by_data(params, values):
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value.data)


def by_shards(params, values):
    shards = [[one.to_local() if isinstance(one, DTensor) else one for one in of] for of in (params, values)]
    with torch.no_grad():
        torch._foreach_copy_(*shards)


WAYS = {"no_grad": by_copy, "data": by_data, "shards": by_shards}


def with_average(sw, write, inside):
    """Do ``inside`` while other weights are in place of the model's."""
    params = list(sw.model.parameters())
    own = [param.detach().clone() for param in params]
    write(params, [value * 0.5 for value in own])
    inside()
    write(params, own)


@pytest.mark.parametrize("way", WAYS)
def test_a_save_that_the_loop_writes_into_fails_by_name_and_the_next_one_is_whole(way, tmp_path: Path, monkeypatch):
    def work(world):
        gate, saved = threading.Event(), []
        monkeypatch.setattr(snapshot, "step_aside", lambda: gate.wait(20))
        sw = switcher(world, build_net, "fsdp2", saves=Saves(root=tmp_path / "saves"), on_saved=saved.append)
        at_edge = {}
        for step in sw.steps(until=400):
            under_way = sw._saver._under_way
            if under_way is not None and not at_edge.get(under_way.step):
                at_edge[under_way.step] = {name: whole(entry.value) for name, entry in sw.world.found.items()}
                if len(at_edge) == 1:
                    held = under_way._taken.snapshot
                    with_average(sw, WAYS[way], lambda held=held: (gate.set(), held._thread.join()))
            train(sw, step, world.rank)
            flag = torch.tensor(float(len(saved)))
            dist.all_reduce(flag)
            if step == 1 or (flag == 2 and len(at_edge) == 1):
                sw.save()
            if flag == 4:
                break
        first, second = saved
        sw.close()
        again = switcher(world, build_net, "dp2", name="again")
        loaded = again.load(Path(second.message))
        found = {name: whole(entry.value) for name, entry in again.world.found.items()}
        same = all(torch.equal(found[name], value) for name, value in at_edge[loaded].items() if name != "scale")
        return first.outcome, first.message, second.outcome, same, Path(first.message).exists()

    for first, why, second, same, there in everywhere(2, work):
        assert (first, second) == ("failed", "done")
        assert "param was written between the step's edge and its optimizer.step()" in why
        assert "validate on a copy" in why
        assert same
        assert not there


@pytest.mark.parametrize("mode", ["keep", "tight"])
@pytest.mark.parametrize("puts_back", [True, False], ids=["put_back", "left"])
def test_what_is_written_before_the_first_update_commits_where_it_is_put_back_and_else_is_named(mode, puts_back):
    def work(world):
        gate, books = threading.Event(), Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books, mode=mode)
        sw._party.hook = lambda event, *_: gate.wait(20) if event == "check" else None
        sw.request("dp2")
        seen, wrote = [], False
        try:
            for step in sw.steps(until=400):
                seen.append(step)
                if sw._course._settling and not wrote:
                    wrote = True
                    check = sw._course._attempt._check

                    def digested(check=check):
                        gate.set()
                        check._thread.join()

                    if puts_back:
                        with_average(sw, by_data, digested)
                    else:
                        with torch.no_grad():
                            sw.model.out.weight.mul_(0.5)
                        digested()
                train(sw, step, world.rank)
                flag = torch.tensor(float(len(books.ends)))
                dist.all_reduce(flag)
                if flag == 2:
                    break
        except SwitchFailedError as failure:
            return "failed", str(failure), True
        return books.ends[0][1], books.ends[0][2], len(set(seen)) == len(seen)

    for outcome, reason, once in everywhere(2, work):
        if puts_back:
            assert (outcome, reason, once) == ("committed", "", True)
        else:
            assert outcome == ("aborted" if mode == "keep" else "failed")
            assert "written between the switch and the first update: out.weight param on ranks [0, 1]" in reason
            assert "digests differ after the move: out.weight param" in reason
