"""A foreign model with fused and padded parameters, switched: equal to the model that has neither, and to the bit."""

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere, idle, switcher, until_ended
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from dynatrain.space.box import within
from dynatrain.train import segments as segments_of
from dynatrain.train.segments import SegmentError
from dynatrain.train.torch_private import local_tensor

WIDTH, WORDS = 6, 11
SEGMENTS = {"mix.qkv": {"mix.q": (12, 6), "mix.k": (4, 2), "mix.v": (4, 2)}, "gate_up": {"gate": 10, "up": 10}}
PADDED = {"head": WORDS}
TOUR = {2: "fsdp2.tp2", 4: "fsdp4", 6: "tp2.fsdp2", 8: "dp2.tp2"}


class Mix(nn.Module):
    """Three times as many heads of q as of k and v, of two elements each."""

    def __init__(self, fused):
        super().__init__()
        if fused:
            self.qkv = nn.Linear(WIDTH, 20)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x):
        if hasattr(self, "qkv"):
            qkv = self.qkv(x)
            part = qkv.shape[-1] // 5
            q, k, v = qkv.split([3 * part, part, part], -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (k.shape[-1] // 2, -1, 2)) for t in (q, k, v))
        return self.out((q * torch.tanh(k) + v).flatten(-3))


class Net(nn.Module):
    """One block, with a head whose rows are padded to a multiple of 4 x tp."""

    def __init__(self, tp, *, fused):
        super().__init__()
        self.mix = Mix(fused)
        if fused:
            self.gate_up = nn.Linear(WIDTH, 20)
        else:
            self.gate, self.up = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)
        self.head = nn.Linear(WIDTH, -(-WORDS // (4 * tp)) * 4 * tp if fused else WORDS, bias=False)

    def forward(self, x):
        x = x + self.mix(x)
        gate, up = self.gate_up(x).chunk(2, -1) if hasattr(self, "gate_up") else (self.gate(x), self.up(x))
        x = x + self.down(torch.tanh(gate) * up)
        return self.head(x)[..., :WORDS]


def build(mesh, layout, *, fused=True, optimizer=torch.optim.AdamW):
    tp = layout.size("tp")
    net = Net(tp, fused=fused).double()
    if tp > 1:
        columns = ("mix.qkv", "gate_up") if fused else ("mix.q", "mix.k", "mix.v", "gate", "up")
        plan = {name: ColwiseParallel() for name in columns} | {"mix.out": RowwiseParallel(), "down": RowwiseParallel()}
        if fused:
            plan["head"] = ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())
        parallelize_module(net, mesh["tp"], plan)
    fully_shard(net, mesh=mesh["dp", "fsdp"])
    return net, optimizer(net.parameters(), lr=1e-2)


def build_plain(mesh, layout):
    return build(mesh, layout, fused=False)


def whole(sw):
    """``{(tensor, state): full tensor}``, put together from the boxes of all ranks; copies are held equal."""
    world, rank = sw.world, dist.get_rank()
    pieces = world.pieces(rank, torch.device("cpu"))
    mine = [
        (world.catalogue[t].name, world.catalogue[t].states[s].name, piece.box, piece.tensor.clone())
        for (t, s), piece in pieces.items()
    ]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    shapes = {(t.name, s.name): t.state_shape(s) for t in world.catalogue for s in t.states}
    found = {}
    for name, state, box, values in (one for of_rank in told for one in of_rank):
        full = found.setdefault((name, state), torch.full(shapes[name, state], torch.nan, dtype=torch.float64))
        place = within(box, tuple((0, size) for size in full.shape))
        assert (full[place].isnan() | (full[place] == values)).all(), f"copies of {name} {state} differ"
        full[place] = values.double()
    assert not any(full.isnan().any() for full in found.values()), "an element that nobody has"
    return found


def stamp(sw):
    """Give every logical parameter values that are functions of its name and its indices alone."""
    world = sw.world
    for (tensor, state), piece in world.pieces(dist.get_rank(), torch.device("cpu")).items():
        one = world.catalogue[tensor]
        if one.states[state].name == "param":
            generator = torch.Generator().manual_seed(sum(map(ord, one.name)))
            full = 0.3 * torch.randn(one.shape, generator=generator, dtype=torch.float64)
            piece.tensor.copy_(full[within(piece.box, tuple((0, size) for size in one.shape))])
    for rest in padding(sw):
        rest.zero_()


def padding(sw):
    """This rank's rows of the head that are nobody's, of every state of its shape."""
    entry = sw.world.found["head.weight"]
    if not entry.slots:
        return []
    value, slot = entry.value, entry.slots[0]
    held = [value, *(v for v in sw.optimizer.state[value].values() if v.ndim)]
    return [local_tensor(one)[slot.rows :] for one in held if local_tensor(one).numel()]


def trained(world, make, tour, mode="keep", *, settings=None):
    """Losses, the whole state at the end, and how the switches ended, of a real loop over one global batch."""
    sw = switcher(world, make, "fsdp4", schedule=tour, mode=mode, data_parallel="free", recorder=(books := Books()), **settings or {})
    stamp(sw)
    losses = []
    for step in sw.steps(until=10):
        share = sw.layout.data_ranks
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        targets = torch.arange(step, step + 4) % WORDS
        mine = sw.world.mesh["dp", "fsdp"].get_coordinate()
        at = mine[0] * sw.layout.size("fsdp") + mine[1]
        rows = slice(at * 4 // share, (at + 1) * 4 // share)
        logits = sw.model(inputs[rows])
        loss = functional.cross_entropy(logits.full_tensor() if isinstance(logits, DTensor) else logits, targets[rows])
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 4)
        assert not any(rest.any() for rest in padding(sw))
    return losses, whole(sw), [end[:2] for end in books.ends]


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_fused_and_padded_model_trains_through_switches_as_the_plain_one(mode):
    declared = {"segments": SEGMENTS, "padded": PADDED}

    def work(world):
        fused = trained(world, build, TOUR, mode, settings={"name": "fused", **declared})
        return fused, trained(world, build_plain, {}, settings={"name": "plain"})

    for (losses, state, ends), (expected, plain, _) in everywhere(4, work, 120):
        assert ends == [(layout, "committed") for layout in TOUR.values()]
        assert losses == pytest.approx(expected, rel=0, abs=1e-12)
        assert state.keys() == plain.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, plain[key], rtol=0, atol=1e-12)
