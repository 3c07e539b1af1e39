"""A foreign stack of experts with gate and up in one parameter, as transformers has it, switches as plain ones do."""

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere, switcher, until_ended
from tests.dist.test_segments import fill, same, whole
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from dynatrain.layout.text import parse_layout
from dynatrain.observe.checkpoints import newest
from dynatrain.plan.storage import storage
from dynatrain.train.groups import expert_mesh
from dynatrain.train.saving import Saves
from dynatrain.train.segments import SegmentError

EXPERTS, WIDTH, INNER, RANK = 6, 4, 8, 2
SEGMENTS = {
    "experts.gate_up_proj": {"experts.gate_proj": INNER, "experts.up_proj": INNER},
    "experts.gate_up_lora_b": {"experts.gate_lora_b": INNER, "experts.up_lora_b": INNER},
}
IDLE = 5
"""An expert that no token is sent to."""
TOUR = {3: "fsdp4.ep2.etp2", 6: "fsdp4.ep2", 9: "fsdp4.etp2"}


class Experts(nn.Module):
    """Every token passes every expert, weighted; ranks that share experts out exchange all tokens.

    Gate and up are frozen and have adapters of low rank; a further adapter is there that nothing uses.
    """

    def __init__(self, *, fused):
        super().__init__()
        stacks = {"gate_up": 2 * INNER} if fused else {"gate": INNER, "up": INNER}
        for name, rows in stacks.items():
            frozen = nn.Parameter(torch.zeros(EXPERTS, rows, WIDTH), requires_grad=False)
            self.register_parameter(f"{name}_proj", frozen)
            self.register_parameter(f"{name}_lora_b", nn.Parameter(torch.zeros(EXPERTS, rows, RANK)))
        self.lora_a = nn.Parameter(torch.zeros(EXPERTS, RANK, WIDTH))
        self.unused_lora_a = nn.Parameter(torch.zeros(EXPERTS, RANK, WIDTH))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))
        self.groups = []

    def cut(self, axes, mesh):
        """Deal the experts out over ep, and over etp the width of each, which lora_a has not."""
        for name, stack in list(self.named_parameters()):
            etp = Replicate() if name.endswith("lora_a") else Shard(2 if name == "down_proj" else 1)
            placed = {"ep": Shard(0), "etp": etp}
            cut = distribute_tensor(stack.detach(), mesh[axes], [placed[axis] for axis in axes])
            setattr(self, name, nn.Parameter(cut, requires_grad=stack.requires_grad))

    def whole(self, name):
        """A stack as a plain tensor; what ranks of etp hold copies of has a gradient that is a sum over them."""
        stack = self.get_parameter(name)
        if not isinstance(stack, DTensor):
            return stack
        grads = [Partial() if placed.is_replicate() else placed for placed in stack.placements]
        return stack.to_local(grad_placements=grads)

    def projected(self, x, name):
        return torch.einsum("nh,efh->enf", x, self.whole(f"{name}_proj")) + torch.einsum(
            "nh,erh,efr->enf", x, self.whole("lora_a"), self.whole(f"{name}_lora_b")
        )

    def forward(self, x, weights, first):
        for group in self.groups:
            x, weights = (all_gather_tensor_autograd(t, 0, group) for t in (x, weights))
        if hasattr(self, "gate_up_proj"):
            gate, up = self.projected(x, "gate_up").chunk(2, -1)
        else:
            gate, up = self.projected(x, "gate"), self.projected(x, "up")
        down = self.whole("down_proj")
        out = torch.einsum("enf,ehf->enh", torch.tanh(gate) * up, down)
        out = torch.einsum("enh,ne->nh", out, weights[:, first : first + len(down)])
        for group in reversed(self.groups):
            out = reduce_scatter_tensor_autograd(out.contiguous(), "sum", 0, group)
        return out


class Net(nn.Module):
    def __init__(self, *, fused):
        super().__init__()
        self.inside, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(fused=fused)
        self.first = 0

    def forward(self, x):
        x = self.inside(x)
        idle = torch.arange(EXPERTS) == IDLE
        return x + self.experts(x, self.gate(x).masked_fill(idle, -torch.inf).softmax(-1), self.first)


def build(mesh, layout, *, fused=True):
    net, experts = Net(fused=fused).double(), expert_mesh()
    axes = tuple(axis for axis in ("ep", "etp") if layout.ways(axis) > 1)
    net.first = layout.index("ep", dist.get_rank()) * EXPERTS // layout.ep
    net.experts.groups = [experts.get_group(axis) for axis in axes]
    if axes:
        net.experts.cut(axes, experts)
    # FSDP2 cuts the dim of the segments where nothing else does, and elsewhere the experts, which are too few for some.
    dim = int(axes == ("ep",))
    fully_shard(net.experts, mesh=experts["efsdp"], shard_placement_fn=lambda _: Shard(dim))
    fully_shard(net, mesh=mesh["dp", "fsdp"])
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def build_plain(mesh, layout):
    return build(mesh, layout, fused=False)


def made(world, make, **more):
    declared = {"segments": SEGMENTS} if make is build else {}
    return switcher(world, make, "fsdp4", legal=lambda text, _: parse_layout(text), **declared | more)


def trained(world, make, tour):
    sw = made(world, make, name=make.__name__, schedule=tour, recorder=(books := Books()))
    fill(sw, params_only=True)
    losses = []
    for step in sw.steps(until=12):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        rows = slice(2 * world.rank, 2 * world.rank + 2)
        loss = functional.mse_loss(sw.model(batch[rows]), batch[rows].roll(1, -1), reduction="sum") / 8
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        losses.append(loss.detach().clone())
        dist.all_reduce(losses[-1])
    found = [loss.item() for loss in losses], whole(sw), [end[1:] for end in books.ends]
    sw.close()
    return found


def test_experts_with_gate_and_up_and_their_adapters_in_one_train_through_switches_as_plain_stacks():
    def work(world):
        return trained(world, build, TOUR), trained(world, build_plain, {})

    for (losses, state, ends), (expected, kept, _) in everywhere(4, work, 120):
        assert ends == [("committed", "")] * 3
        assert losses == pytest.approx(expected, rel=0, abs=1e-12)
        assert losses[-1] != pytest.approx(losses[0], rel=0, abs=1e-3)
        kinds = {name: [key for other, key in state if other == name] for name, _ in state}
        assert kinds["experts.gate_proj"] == kinds["experts.up_proj"] == ["param"]
        assert kinds["experts.gate_lora_b"] == ["param", "exp_avg", "exp_avg_sq", "step"]
        assert state["experts.up_lora_b", "exp_avg"][:IDLE].all()
        assert not state["experts.up_lora_b", "exp_avg"][IDLE].any()
        assert state["experts.lora_a", "step"] == 12
        assert state["experts.unused_lora_a", "step"] == 0
        assert state.keys() == kept.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, kept[key], rtol=0, atol=1e-12)


@pytest.mark.sweep
def test_every_bit_of_them_goes_there_and_back_in_both_modes_and_into_the_plain_model(tmp_path):
    def work(world):
        failing = [True]

        def hook(event, *_):
            if event == "bound" and world.rank == 1 and failing:
                failing.clear()
                raise RuntimeError("planted")

        sw = made(world, build, hook=hook, recorder=(books := Books()), saves=Saves(root=tmp_path))
        fill(sw)
        first, seen = whole(sw), []
        for mode in ("tight", "keep"):
            for layout in (*TOUR.values(), "fsdp4"):
                sw.request(layout, mode=mode)
                ((_, outcome, reason),) = until_ended(sw, books)
                table = storage(sw.world.catalogue, sw.world.ownership, sw.world.ownership)
                counted = sw._party.memory.held == table.old[world.rank]
                seen.append((outcome, "planted" in reason, same(first, whole(sw)), counted))
        sw.save_now()
        sw.close()
        plain = made(world, build_plain, name="plain")
        plain.load(newest(tmp_path)[0])
        plain.close()
        with pytest.raises(SegmentError) as refused:
            made(world, build, name="odd", segments={"experts.gate_up_proj": {"gate": (INNER, 1), "up": INNER - 1}})
        return seen, same(first, whole(plain)), str(refused.value)

    for (aborted, *seen), loaded, refused in everywhere(4, work, 100):
        assert aborted == ("aborted", True, True, True)
        assert seen == [("committed", False, True, True)] * 7
        assert loaded
        assert "has shape (6, 16, 4), its segments have 15 rows along one dim" in refused
