"""A foreign model with fused and padded parameters, switched: equal to the model that has neither, and to the bit."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, Shadow, everywhere, switcher, until_ended
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from dynatrain.observe.checkpoints import newest
from dynatrain.plan.storage import storage
from dynatrain.space.box import within
from dynatrain.train import attempt as attempts
from dynatrain.train.live import UnplacedTensorError
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.saving import Saves
from dynatrain.train.segments import SegmentError
from dynatrain.train.torch_private import local_tensor

WIDTH, WORDS = 6, 11
SEGMENTS = {"mix.qkv": {"mix.q": (12, 6), "mix.k": (4, 2), "mix.v": (4, 2)}, "gate_up": {"gate": 10, "up": 10}}
PADDED = {"head": WORDS}
DECLARED = {"segments": SEGMENTS, "padded": PADDED}
TOUR = {3: "fsdp2.tp2", 6: "fsdp4", 9: "tp2.fsdp2"}


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


def fill(sw, *, params_only=False):
    """Give everything that is held values that are functions of its names and indices alone; padding is zero."""
    world = sw.world
    for (tensor, state), piece in world.pieces(dist.get_rank(), torch.device("cpu")).items():
        one = world.catalogue[tensor]
        if state == 0 or not (params_only or one.states[state].scalar):
            generator = torch.Generator().manual_seed(sum(map(ord, one.name + one.states[state].name)))
            full = torch.rand(one.shape, generator=generator, dtype=torch.float64) - 0.5
            piece.tensor.copy_(full[within(piece.box, tuple((0, size) for size in one.shape))])
    for rest in padding(sw):
        rest.zero_()


def padding(sw):
    """This rank's rows of the head that are nobody's, of every state of its shape."""
    entry = sw.world.found.get("head.weight")
    if entry is None or not entry.slots:
        return []
    value, slot = entry.value, entry.slots[0]
    held = [value, *(v for v in sw.optimizer.state[value].values() if v.ndim)]
    return [local_tensor(one)[slot.rows :] for one in held if local_tensor(one).numel()]


def micro_batch(sw, number):
    """Forward and backward of this data rank's rows; its loss."""
    share = sw.layout.data_ranks
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    targets = torch.arange(number, number + 4) % WORDS
    mine = sw.world.mesh["dp", "fsdp"].get_coordinate()
    at = mine[0] * sw.layout.size("fsdp") + mine[1]
    rows = slice(at * 4 // share, (at + 1) * 4 // share)
    logits = sw.model(inputs[rows])
    loss = functional.cross_entropy(logits.full_tensor() if isinstance(logits, DTensor) else logits, targets[rows])
    (loss / 2).backward()
    return loss.detach()


def trained(world, make, tour, mode="keep", *, settings=None):
    """Losses, the whole state at the end, and how the switches ended, of a real loop over two micro-batches a step."""
    sw = switcher(
        world,
        make,
        "fsdp4",
        schedule=tour,
        mode=mode,
        data_parallel="free",
        recorder=(books := Books()),
        **settings or {},
    )
    fill(sw, params_only=True)
    losses = []
    for step in sw.steps(until=12):
        total = torch.zeros((), dtype=torch.float64)
        for part in sw.step_parts(2):
            for number in part:
                total += micro_batch(sw, 2 * step + number)
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / 8)
        assert not any(rest.any() for rest in padding(sw))
    return losses, whole(sw), [end[:2] for end in books.ends]


@pytest.fixture(scope="module")
def plain():
    return everywhere(4, lambda world: trained(world, build_plain, {}), 120)


@pytest.mark.parametrize("mode", ["keep", pytest.param("tight", marks=pytest.mark.sweep)])
def test_a_fused_and_padded_model_trains_through_switches_as_the_plain_one(plain, mode):
    """The second switch comes inside its step."""
    settings = DECLARED | {"inside": {6: 1}}
    found = everywhere(4, lambda world: trained(world, build, TOUR, mode, settings=settings), 120)
    for (losses, state, ends), (expected, kept, _) in zip(found, plain, strict=True):
        assert ends == [(layout, "committed") for layout in TOUR.values()]
        assert losses == pytest.approx(expected, rel=0, abs=1e-12)
        assert state.keys() == kept.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, kept[key], rtol=0, atol=1e-12)


def exchanged(found):
    """Gate and up in one another's place, as a loader that cuts the fused rows in two would have them."""
    gate, up = found["gate_up.weight"].slots
    swapped = replace(gate, first=up.first, rows=up.rows), replace(up, first=gate.first, rows=gate.rows)
    return {"gate.weight": swapped[0], "up.weight": swapped[1]}


def one_row_late(found):
    """The rows of the head begin one later: its last real row lies in the padding, where nothing may."""
    (head,) = found["head.weight"].slots
    room = len(local_tensor(found["head.weight"].value)) - head.rows
    return {"head.weight": replace(head, first=1 if head.rows and room else 0)}


def misread(patch, fault):
    """From now on every world that holds what arrived reads some of its slots as ``fault`` has them."""
    bound = attempts.bind

    def bind(party, old, new, *given):
        names = bound(party, old, new, *given)
        new.where |= {name: (new.where[name][0], slot) for name, slot in fault(new.found).items()}
        return names

    patch.setattr(attempts, "bind", bind)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("mode", [pytest.param("keep", marks=pytest.mark.sweep), "tight"])
def test_there_and_back_moves_every_bit_and_nothing_of_the_padding(mode):
    def work(world):
        failing = [True]

        def hook(event, *_):
            if event == "bound" and world.rank == 1 and failing:
                failing.clear()
                raise RuntimeError("planted")

        settings = DECLARED | {"mode": mode, "hook": hook, "recorder": (books := Books())}
        sw = switcher(world, build, "fsdp4", data_parallel="free", **settings)
        sw.register("ema", Shadow(sw.model, local=False))
        fill(sw)
        first = whole(sw)
        seen = []
        for layout in ("fsdp2.tp2", "fsdp2.tp2", "dp2.tp2", "fsdp4"):
            for rest in padding(sw):
                rest.fill_(torch.nan)
            sw.request(layout)
            seen.append((until_ended(sw, books), same(first, whole(sw)), [bool(rest.any()) for rest in padding(sw)]))
        held = sw._party.memory.held
        distinct = {p.storage.data_ptr(): p.nbytes for p in sw.world.pieces(world.rank, torch.device("cpu")).values()}
        table = storage(sw.world.catalogue, sw.world.ownership, sw.world.ownership)
        return seen, held == sum(distinct.values()) == table.old[world.rank]

    for (aborted, *seen), counted in everywhere(4, work):
        assert counted
        ((_, outcome, reason),), equal, _ = aborted
        assert (outcome, equal) == ("aborted", True)
        assert "planted" in reason
        for ((_, outcome, reason),), equal, leaked in seen:
            assert (outcome, reason, equal, any(leaked)) == ("committed", "", True, False)


def test_exchanged_segments_and_a_padded_row_that_leaks_are_caught_and_too_many_ways_are_refused():
    def work(world):
        sw = switcher(world, build, "fsdp4", mode="keep", data_parallel="free", recorder=(books := Books()), **DECLARED)
        fill(sw)
        first, ends = whole(sw), []
        for fault, layout in ((exchanged, "dp2.tp2"), (one_row_late, "fsdp2.tp2"), (None, "tp4")):
            with pytest.MonkeyPatch.context() as patch:
                if fault:
                    misread(patch, fault)
                sw.request(layout)
                ends += until_ended(sw, books)
        return ends, same(first, whole(sw)), sw.layout.size("tp")

    for ends, kept, tp in everywhere(4, work):
        assert kept
        assert tp == 1
        assert [outcome for _, outcome, _ in ends] == ["aborted"] * 3
        (_, _, swapped), (_, _, leaked), (_, _, refused) = ends
        assert "digests differ after the move: " in swapped
        assert "gate.weight param on rank 0" in swapped
        assert "head.weight param on rank" in leaked
        assert (
            "mix.k.weight in mix.qkv.weight has 2 heads (or rows), which tp4 does not divide; nearest is tp2" in refused
        )
        assert "gate.weight in gate_up.weight has 10 heads" in refused


def test_a_fused_model_resumes_as_a_plain_one_and_back(tmp_path):
    def save(world, make, folder, declared):
        sw = switcher(world, make, "fsdp2", saves=Saves(root=folder), **declared)
        fill(sw)
        sw.save_now()
        return whole(sw)

    def load(world, make, folder, declared):
        sw = switcher(world, make, "fsdp2.tp2" if world.size == 4 else "fsdp2", **declared)
        sw.load(newest(folder)[0])
        return whole(sw)

    fused, plain = (build, DECLARED), (build_plain, {})
    for number, (one, other, size) in enumerate(((fused, plain, 2), (plain, fused, 4))):
        folder = tmp_path / str(number)
        written = everywhere(2, lambda world, o=one, f=folder: save(world, o[0], f, o[1]))
        read = everywhere(size, lambda world, o=other, f=folder: load(world, o[0], f, o[1]))
        assert all(same(written[0], found) for found in read)


def test_what_is_not_as_declared_is_refused_at_start_by_name():
    wrong = (
        {"segments": {"mix.qkv": {"mix.q": 12, "mix.k": 4}}},
        {"segments": {"gate_up": {"down": 10, "up": 10}}},
        {"segments": {"gate_up": {"gate": (10, 3), "up": 10}}, "padded": {"gate_up": 20}},
        {"segments": {"gate_up": {"gate": (10, 3), "up": 10}}},
        {"padded": {"head": 13}},
        {"padded": {"haed": 11}},
    )

    def work(world):
        said = []
        for number, settings in enumerate(wrong):
            with pytest.raises(SegmentError) as refused:
                switcher(world, build, "dp1", name=str(number), **settings)
            said.append(str(refused.value))
        with pytest.raises(UnplacedTensorError) as refused:
            switcher(world, lambda *a: build(*a, optimizer=Adafactor), "dp1", name="factored", **DECLARED)
        return [*said, str(refused.value)]

    said = everywhere(1, work)[0]
    expected = (
        "mix.qkv.weight has shape (20, 6), its segments have 16 rows along one dim; mix.qkv.bias has shape (20,)",
        "share the names down.bias, down.weight",
        "gate_up.weight falls under gate_up and gate_up; declare it once",
        "gate.weight has 10 rows, which are not 3 equal heads",
        "head.weight has shape (12, 6), and is declared to have 13 real rows",
        "no tensor has haed in its name",
        "is one number for many rows",
    )
    for words, wanted in zip(said, expected, strict=True):
        assert wanted in words
