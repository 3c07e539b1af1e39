"""A loop of one's own with a list of optimizers, two of them not Adam, and a parameter whose gradient comes late."""

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, Net, batch, everywhere, shard, switcher, whole
from torch import nn
from torch.nn import functional

from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.muon import Muon

SWITCH, LATE, STEPS = 3, 5, 8


class LateNet(Net):
    """A net whose last block is skipped in the first steps."""

    late = False

    def forward(self, x):
        x = self.inside(x) * self.scale
        x = x + self.blocks[0](x)
        if self.late:
            x = x + self.blocks[1](x)
        return self.out(self.frozen(x))


def build(mesh, _layout):
    if torch.empty(0).device.type != "meta":
        torch.manual_seed(3)
    net = shard(LateNet().double(), mesh)
    matrices = [block[place].weight for block in net.blocks for place in (0, 2)]
    biases = [block[place].bias for block in net.blocks for place in (0, 2)]
    rest = [*net.inside.parameters(), *net.out.parameters(), *net.frozen.parameters()]
    groups = [{"params": rest}, {"params": [], "lr": 1.0}]
    return net, [Muon(matrices, lr=1e-2), Adafactor(groups, lr=1e-2), torch.optim.SGD(biases, lr=1e-2, momentum=0.9)]


def loop(world, tour):
    """Losses, all that is held at the end, calls of a hook on the second optimizer, and ends of switches."""
    books, calls = Books(), []
    sw = switcher(world, build, "fsdp2", schedule=tour, recorder=books)
    sw.optimizer.optimizers[1].register_step_post_hook(lambda *_: calls.append(1))
    losses = []
    for step in sw.steps(until=STEPS):
        sw.model.late = step >= LATE
        inputs, targets = batch(step, world.rank)
        loss = functional.mse_loss(sw.model(inputs), targets)
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        losses.append(loss.item())
        dist.barrier()
        if step == LATE - 1:
            untouched = sw.model.blocks[1][0]
            assert untouched.weight.grad is None
            assert not whole(sw.optimizer.state[untouched.weight]["momentum_buffer"]).any()
    values = {
        name: whole(entry.value) for name, entry in sw.world.found.items() if isinstance(entry.value, nn.Parameter)
    }
    return losses, values, len(calls), [end[1] for end in books.ends]


def test_several_optimizers_of_a_list_go_on_as_without_a_switch():
    moved, stayed = (everywhere(2, lambda world, t=tour: loop(world, t)) for tour in ({SWITCH: "dp2"}, {}))
    for (losses, held, calls, ends), (expected, kept, _, _) in zip(moved, stayed, strict=True):
        assert ends == ["committed"]
        assert losses == pytest.approx(expected, rel=0, abs=1e-12)
        assert calls == STEPS
        for name, value in kept.items():
            torch.testing.assert_close(held[name], value, rtol=0, atol=1e-12)
