"""What a loop accumulates over several steps of ``sw.steps`` is there at its update, however it calls the model."""

from pathlib import Path

import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere, switcher, whole
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dynatrain.train.saving import Saves


class Apart(nn.Module):
    """Two units that a loop may call itself."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.encoder(x))

    def units(self):
        return [self.encoder, self.head]


class Method(nn.Module):
    """Computes in a method of its own with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def units(self):
        return [self]

    def score(self, x):
        return x * self.scale


def built(make):
    def build(mesh, _layout):
        model = make()
        for unit in model.units():
            fully_shard(unit, mesh=mesh["dp", "fsdp"])
        if make is Method:
            register_fsdp_forward_method(model, "score")
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    return build


LOOPS = {
    "modules called apart": (Apart, lambda model, x: model.head(model.encoder(x))),
    "a method of the model's": (Method, lambda model, x: model.score(x)),
}
MICRO = 3


def accumulate(sw, call, step):
    call(sw.model, torch.full((2, 6), 1.0 + step % MICRO)).sum().backward()
    dist.barrier()


def test_an_order_waits_for_the_update_of_what_was_accumulated_over_steps(tmp_path: Path):
    def work(world):
        found = {}
        for name, (make, call) in LOOPS.items():
            torch.manual_seed(0)
            books, saves = Books(), Saves(root=tmp_path / name.split()[0])
            sw = switcher(world, built(make), "fsdp2", name=name, recorder=books, saves=saves)
            sums, refused = [], 0
            for step in sw.steps(until=60):
                if step == MICRO:  # the edges of the first update are past, so the order comes in the midst of a sum
                    sw.request("dp2")
                accumulate(sw, call, step)
                if step % MICRO == 0:
                    try:
                        sw.save_now()
                    except RuntimeError as error:
                        refused += "is under way" in str(error)
                if step % MICRO == MICRO - 1:
                    sums.append(sum(whole(param.grad).double().sum().item() for param in sw.model.parameters()))
                    sw.optimizer.step()
                    sw.optimizer.zero_grad()
                    if step > 30 and books.ends:
                        break
            found[name] = [end[:2] for end in books.ends], len(set(sums)), refused == len(sums)
            sw.close()
        return found

    for found in everywhere(2, work):
        assert found == dict.fromkeys(LOOPS, ([("dp2", "committed")], 1, True))


def test_closures_and_skipped_updates_let_orders_begin(tmp_path: Path):
    def work(world):
        ends, saved = [], []
        for name in ("closure", "skipped"):
            books = Books()
            sw = switcher(
                world, built(Apart), "fsdp2", name=name, recorder=books, deadline=3.0, saves=Saves(root=tmp_path / name)
            )
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

            def closure(sw=sw):
                sw.optimizer.zero_grad()
                loss = sw.model(torch.ones(2, 6)).sum()
                loss.backward()
                return loss

            sw.request("dp2")
            for step in sw.steps(until=2000):
                if name == "closure":
                    sw.optimizer.step(closure)
                else:
                    scaler.scale(sw.model(torch.full((2, 6), float("inf"))).sum()).backward()
                    scaler.step(sw.optimizer)
                    scaler.update()
                    sw.optimizer.zero_grad()
                if step == 3:
                    saved.append(sw.save_now().split()[0])
                flag = torch.tensor(float(len(books.ends)))
                dist.all_reduce(flag)
                if step > 3 and (flag == 2 or (name == "skipped" and step > 300)):
                    break
            ends.append([end[:2] for end in books.ends])
            sw.close()
        return ends, saved

    for ends, saved in everywhere(2, work):
        assert saved == ["saved", "saved"]
        assert ends == [[("dp2", "committed")]] * 2
