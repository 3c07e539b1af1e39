"""A small job whose every element carries its own address, the plain way to plan for it, and threads as ranks."""

import itertools
import threading

import torch
from tests.doubles import Hub, LocalTransport

from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pieces import Piece, Pool
from dynatrain.execute.rounds import Executor
from dynatrain.layout.layout import Layout
from dynatrain.plan.plan import Move, RankPlan, Schedule
from dynatrain.space.box import intersect, shape_of, volume, whole, within
from dynatrain.space.ownership import declared
from dynatrain.space.tensor import FIRST, LAST, State, Tensor

LAYERS = 4
FORMS = (
    State("codes", "uint8"),
    State("scale", "float32", block=5),
    State("row", "float32", reduced=(1,)),
    State("column", "float64", reduced=(0,)),
)
ADAM = (
    State("param", "float32"),
    State("exp_avg", "float32"),
    State("exp_avg_sq", "float64"),
    State("step", "float32", scalar=True),
)


def _tensor(name, shape, cuts, anchors, states=ADAM):
    return Tensor(name=name, shape=shape, cuts=cuts, anchors=anchors, states=states, unit=name.rsplit(".", 1)[0])


def job():
    """Uneven rows, both directions of tp, states of every form, a tied embedding, odd buffers, a scalar tensor."""
    found = [_tensor("embedding.weight", (13, 6), (("tp", 0), ("fsdp", 0)), (FIRST, LAST))]
    for layer in range(LAYERS):
        found += [
            _tensor(f"layers.{layer}.wq", (11, 6), (("tp", 0), ("fsdp", 0)), (layer,), ADAM + FORMS * (layer == 2)),
            _tensor(f"layers.{layer}.wo", (6, 12), (("tp", 1), ("fsdp", 0)), (layer,), ADAM + FORMS * (layer == 1)),
            _tensor(f"layers.{layer}.norm", (6,), (("fsdp", 0),), (layer,)),
        ]
    found += [
        _tensor("experts", (4, 3, 5), (("tp", 2), ("fsdp", 0)), (1,), (State("param", "bfloat16"),)),
        _tensor("mask", (7, 3), (("fsdp", 0),), (0,), (State("param", "bool"), State("ema.count", "int64"))),
        _tensor("scale", (), (), (LAST,), (State("param", "float16"),)),
    ]
    return tuple(found)


def layout(text, order=()):
    """``dp2.fsdp2`` as a layout; the real parser is tested elsewhere."""
    axes = tuple(
        (part.rstrip("0123456789"), int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))) for part in text.split(".")
    )
    return Layout(axes=tuple(axis for axis in axes if axis[1] > 1), order=tuple(order))


def owns(catalogue, text, order=(), members=None):
    where = layout(text, order)
    return declared(catalogue, where if members is None else where.over(members), LAYERS)


def box_of(catalogue, ownership, granule, rank):
    """The box of a granule on a rank, or None."""
    if rank not in (ownership.layout.order or range(ownership.layout.world_size)):
        return None
    box = ownership.box(catalogue[granule[0]], rank)
    return None if box is None else catalogue[granule[0]].states[granule[1]].box(box, catalogue[granule[0]].shape)


def granules(catalogue):
    return [(t, s) for t, tensor in enumerate(catalogue) for s in range(len(tensor.states))]


def schedule(catalogue, mode, per_round=5):
    every = granules(catalogue)
    return Schedule(rounds=tuple(tuple(every[i : i + per_round]) for i in range(0, len(every), per_round)), mode=mode)


def plans(catalogue, old, new, size, rounds):
    """Everybody's plan, by comparing everybody's boxes: slow and obvious."""
    sends, receives, relays, adopted = ([[] for _ in range(size)] for _ in range(4))
    for granule, dst in itertools.product(granules(catalogue), range(size)):
        box = box_of(catalogue, new, granule, dst)
        if box is None:
            continue
        if box_of(catalogue, old, granule, dst) == box:
            adopted[dst].append(granule)
            continue
        holders = {}
        for rank in range(size):
            held = box_of(catalogue, old, granule, rank)
            cut = None if held is None else intersect(held, box)
            if cut is not None:
                holders.setdefault(cut, []).append(rank)
        for cut, ranks in holders.items():
            src = dst if dst in ranks else ranks[dst % len(ranks)]
            move = Move(tensor=granule[0], states=(granule[1],), box=cut, src=src, dst=dst)
            if src == dst:
                relays[dst].append(move)
            else:
                sends[src].append(move)
                receives[dst].append(move)
    return [
        RankPlan(
            rank=rank,
            sends=tuple(sends[rank]),
            receives=tuple(receives[rank]),
            relays=tuple(relays[rank]),
            adopted=tuple(adopted[rank]),
            schedule=rounds,
        )
        for rank in range(size)
    ]


def dtype_of(catalogue, granule):
    return getattr(torch, catalogue[granule[0]].states[granule[1]].dtype)


def stamp(catalogue, granule, box):
    """What ``box`` of a granule must hold: bits that depend on tensor, state and global index."""
    shape = catalogue[granule[0]].state_shape(catalogue[granule[0]].states[granule[1]])
    index = torch.arange(volume(whole(shape)), dtype=torch.int64).reshape(shape)[within(box, whole(shape))]
    bits = (index + 1_000_003 * granule[0] + 7_368_787 * granule[1] + 1) * -7046029254386353131
    bits = bits ^ (bits >> 29)
    dtype = dtype_of(catalogue, granule)
    if dtype == torch.bool:
        return (bits >> 40) % 2 == 1
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return bits.to(integer).view(dtype)


def same_bits(one, other):
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


class Rank:
    """One rank of the job: its pieces, pool and executor."""

    def __init__(self, catalogue, old, new, plan, transport, agree):
        self.catalogue, self.ownership, self.plan, self.rank = catalogue, new, plan, plan.rank
        self.pool, self.agree = Pool(poison=True), agree
        self.old = {}
        for granule in granules(catalogue):
            box = box_of(catalogue, old, granule, plan.rank)
            if box is not None:
                # Every second one padded in storage, as FSDP pads.
                bits = stamp(catalogue, granule, box)
                tensor = self.pool.allocate(shape_of(box), bits.dtype, bits.nbytes + 16 * (granule[0] % 2))
                self.old[granule] = Piece(tensor.copy_(bits), box)
        self.old_bytes = self.pool.held
        mine = (
            {g: p for g in granules(catalogue) if g not in plan.adopted and (p := self.make(g))}
            if (plan.schedule.mode == "keep")
            else None
        )
        self.executor = Executor(
            exchange=Exchange(plan=plan, catalogue=catalogue, transport=transport, pool=self.pool),
            old=self.old,
            target=self.make if mine is None else mine.get,
            agree=agree,
            hook=lambda _event, _round: None,
        )

    def make(self, granule):
        box = box_of(self.catalogue, self.ownership, granule, self.rank)
        if box is None:
            return None
        return Piece(self.pool.allocate(shape_of(box), dtype_of(self.catalogue, granule)), box)

    def misplaced(self, ownership, pieces):
        """Granules that this rank does not hold as ``ownership`` and the stamps say."""
        wrong = []
        for granule in granules(self.catalogue):
            box = box_of(self.catalogue, ownership, granule, self.rank)
            if (box is None) != (granule not in pieces):
                wrong.append(granule)
            elif box is not None:
                piece = pieces[granule]
                if piece.box != box or not same_bits(piece.tensor, stamp(self.catalogue, granule, box)):
                    wrong.append(granule)
        return wrong


class Ballot:
    """All ranks' votes on a round: False where one failed."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)

    def __call__(self, _round):
        try:
            self.barrier.wait(20)
        except threading.BrokenBarrierError:
            return False
        return True


def everywhere(ranks, work):
    """``work(rank)`` on one thread per rank; results or exceptions, by rank. A failure breaks the rank's ballot."""
    found = [None] * len(ranks)

    def body(number):
        try:
            found[number] = work(number)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[number] = error
            ranks[number].agree.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def local(size, **kwargs):
    """Transports of all ranks, connected."""
    hub = Hub(size)
    return [LocalTransport(hub, rank, **kwargs) for rank in range(size)]
