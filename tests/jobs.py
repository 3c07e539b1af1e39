"""A small training job on forked ranks, through the real ``Switcher`` and ``Trainer``; and the oracle's run of it."""

import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch._dynamo  # torch imports it late, in every rank, where the parent has not
import torch.distributed as dist
from tests import oracle, ranks
from tests.doubles import LateTransport
from tests.shapes import small_shape

from dynatrain.cluster.board import Board
from dynatrain.cluster.kernel import RANK_PRIORITY, take_realtime
from dynatrain.data.order import batch_ids
from dynatrain.data.samples import Samples
from dynatrain.execute.transport import GroupTransport
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.models.initial import initial_box, initial_rule
from dynatrain.space.box import whole, within
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision, master_dtype
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Job, Trainer

TEN = (
    "dp4",
    "fsdp4",
    "dp2.fsdp2",
    "tp4",
    "tp4-sp",
    "fsdp2.tp2",
    "dp2.tp2-sp",
    "pp4",
    "pp2.fsdp2",
    "pp2.tp2",
)
"""Layouts of four ranks, every axis and its products among them."""

SHAPE = small_shape(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
"""Legal for all of :data:`TEN`; its 61 rows of vocabulary are uneven in every cut."""

TOKENS = 32


def circuit(layouts, seed):
    """A closed walk over ``layouts`` that takes every ordered pair of them exactly once."""
    generator = random.Random(seed)
    left = {one: [other for other in layouts if other != one] for one in layouts}
    for others in left.values():
        generator.shuffle(others)
    walk, stack = [], [generator.choice(layouts)]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return tuple(walk[::-1])


@dataclass(frozen=True, kw_only=True)
class Case:
    """What runs: ``steps_each`` steps in each layout of ``tour``; the switches take ``modes`` in turn.

    With ``after``, a visit's first step begins with that many micro-batches in the layout before. With ``moved``, ranks
    also hand back all that they held at both ends of each switch.
    """

    tour: tuple[str, ...]
    size: int = 4
    steps_each: int = 3
    modes: tuple[str, ...] = ("keep",)
    compute: str = "fp64"
    seed: int = 1
    shape: DecoderShape = SHAPE
    micro_batches: int = 4
    samples: int = 84
    clip: float = 1.0
    exact_norm: bool = False
    late: bool = False
    after: int = 0
    schedule: str = "1f1b"
    recompute: str = "none"
    compile_with: str = ""
    tokens: int = TOKENS
    optimizer: str = "adamw"
    bf16: bool = False
    moved: bool = False

    @property
    def steps(self):
        return self.steps_each * len(self.tour)

    @property
    def settings(self):
        return OptimizerSettings(
            name=self.optimizer,
            lr=1e-3,
            bf16_newton_schulz=self.bf16,
            warmup_steps=5,
            total_steps=self.steps,
            clip_norm=self.clip,
            exact_norm=self.exact_norm,
        )

    def job(self):
        return Job(
            shape=self.shape,
            seed=self.seed,
            precision=Precision(compute=self.compute),
            optimizer=self.settings,
            global_sequences=self.micro_batches,
            micro_sequences=1,
            schedule=self.schedule,
            recompute=self.recompute,
            compile_with=self.compile_with,
        )

    def data(self):
        tokens = np.random.default_rng(self.seed).integers(0, self.shape.vocab_size, self.samples * self.tokens + 1)
        return Samples(tokens=tokens.astype(np.uint16), sequence=self.tokens)


def beginning(case):
    """The initial value of every tensor, by name."""
    dtype = str(master_dtype(case.compute)).removeprefix("torch.")
    return {
        tensor.name: initial_box(
            case.seed,
            tensor.name,
            tensor.shape,
            whole(tensor.shape),
            rule=initial_rule(tensor.name, case.shape),
            dtype=getattr(torch, tensor.states[0].dtype),
        )
        for tensor in catalogue(case.shape, dtype, optimizer="")
    }


def batch_of(case, step):
    """The micro-batches of a step, as the oracle takes them."""
    data = case.data()
    for number in batch_ids(case.seed, step, case.micro_batches, case.samples).reshape(-1, 1):
        inputs, targets = data.batch(number)
        yield torch.from_numpy(number), torch.from_numpy(inputs), torch.from_numpy(targets)


def expected(case, *, tree=True):
    """Each step's loss, and ``{(tensor, state): value}`` at the end of each visit, by the oracle."""
    dtype = str(master_dtype(case.compute)).removeprefix("torch.")
    kinds = {tensor.name: tensor.states[0].name for tensor in catalogue(case.shape, dtype, optimizer="")}
    settings = case.settings
    losses, visits = [], []
    for step, (loss, weights, moments) in enumerate(
        oracle.train(
            beginning(case),
            case.shape,
            (list(batch_of(case, step)) for step in range(case.steps)),
            seed=case.seed,
            rate=settings.lr,
            warmup=settings.warmup_steps,
            steps=settings.total_steps,
            clip=settings.clip_norm or float("inf"),
            tree=tree,
            by=settings.name,
        )
    ):
        losses.append(loss)
        if step % case.steps_each == case.steps_each - 1:
            held = {(name, kinds[name]): value.clone() for name, value in weights.items()}
            held |= {(name, key): value.clone() for name, of in moments.items() for key, value in of.items()}
            visits.append(held)
    return losses, visits


def train(case, visits, seconds=280):
    """Run the case on forked ranks; after each visit every rank compares its pieces with ``visits``."""
    return everywhere(case.size, lambda world: _train(case, visits, world), seconds)


def everywhere(size, work, seconds=60):
    """``work(world)`` on forked ranks that have a default group; what the ranks returned, or the first failure."""
    found = ranks.run(size, lambda world: _inside(world, work), seconds)
    failed = {rank: result for rank, result in enumerate(found) if result is None or isinstance(result, Exception)}
    assert not failed, "\n".join(f"rank {rank}: {result or 'died or hung'}" for rank, result in failed.items())
    return found


def _inside(world, work):
    take_realtime(RANK_PRIORITY)
    store = dist.PrefixStore("default", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=60))
    return work(world)


def meeting(world):
    """Where the ranks of a ``Switcher`` agree: a connection of its own for the board, so that no call there waits."""
    board = dist.PrefixStore("board", dist.TCPStore("127.0.0.1", world.store.port, is_master=False))
    return {
        "deadline": 20.0,
        "board": Board(board, world.size),
        "store": dist.PrefixStore("groups", world.store),
    }


def switcher(job, world, layout, **more):
    """A ``Switcher`` of ``job``."""
    given = {"state": {"schedule": job.scheduler}, "initial": job.initial, "names": canonical_name}
    # Our own build knows every axis.
    given["legal"] = lambda text, _: resolve(parse_layout(text), job.shape.num_hidden_layers)
    return Switcher(job.build, layout=layout, **given | meeting(world) | more)


def late(group, members):
    """The late double over gloo."""
    return LateTransport(GroupTransport(group, members), seed=group.rank())


class Books:
    """A recorder that keeps ``(outcome, reason, first step in the layout, digests equal)`` of every switch."""

    def __init__(self):
        self.switches = []

    def announced(self, order, step):
        pass

    def step_ended(self, at):
        pass

    def ended(self, attempt, outcome, reason, step, told):  # noqa: ARG002 - the recorder's face
        equal = attempt.report is not None and attempt.report.equal
        self.switches.append((outcome, reason, step, equal))


class Asking:
    """Data that remembers which samples this rank was given."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def batch(self, ids):
        self.asked += ids.tolist()
        return self.data.batch(ids)

    def documents(self, ids):
        return self.data.documents(ids)

    def take(self):
        asked, self.asked = self.asked, []
        return asked


def held(world, rank):
    """``((tensor, state), box, value)`` of all that this rank holds."""
    tensors = {tensor.name: tensor for tensor in world.catalogue}
    for (name, state), value in world.values().items():
        kept = next(one for one in tensors[name].states if one.name == state)
        yield (name, state), world.ownership.state_box(tensors[name], kept, rank), value


def distance(world, rank, want):
    """State by state, the largest difference between what this rank holds and its boxes of ``want``."""
    found = {}
    for (name, state), box, value in held(world, rank):
        whole_value = want[name, state]
        part = whole_value[within(box, whole(tuple(whole_value.shape)))]
        assert (part.shape, part.dtype) == (value.shape, value.dtype)
        apart = (part - value).abs().max().item() if value.numel() else 0.0
        found[state] = max(found.get(state, 0.0), float("inf") if apart != apart else apart)  # noqa: PLR0124 - NaN
    return found


class Ends:
    """What one rank holds at the end of each visit, and again as its next step begins in another layout.

    Where the switch comes between two parts of a step, what that step writes is left out: gradients and buffers.
    """

    def __init__(self, sw, rank):
        self.sw, self.rank, self.found, self.left = sw, rank, [], None
        self.world, self.parts = sw.world, sw.step_parts
        sw.step_parts = self.step_parts

    def copied(self):
        return {key: (box, value.detach().clone().numpy()) for key, box, value in held(self.sw.world, self.rank)}

    def leave(self):
        self.left = self.copied()

    def step_parts(self, num_micro_batches):
        if self.sw.world is not self.world:
            self.found.append((self.left, self.copied()))
            self.world = self.sw.world
        left = {}
        for part in self.parts(num_micro_batches):
            if self.sw.world is not self.world:
                self.found.append((left, self.unwritten()))
                self.world = self.sw.world
            yield part
            left = self.unwritten()

    def unwritten(self):
        return {key: held for key, held in self.copied().items() if key[1] not in {"grad", "buffer"}}


def _train(case, visits, world):
    job, data, books = case.job(), Asking(case.data()), Books()
    more = {"transport": late} if case.late else {}
    sw = switcher(job, world, case.tour[0], recorder=books, **more)
    for number, layout in enumerate(case.tour[1:], 1):
        mode = case.modes[number % len(case.modes)]
        sw.request(layout, mode=mode, at=number * case.steps_each, after=case.after)
    steps, apart, places = [], [], []
    ends = Ends(sw, world.rank) if case.moved else None

    def after(result):
        steps.append((result.step, result.loss, result.grad_norm, result.lr, result.ids.tolist(), data.take()))
        places.append(sw.world.layout)
        if result.step % case.steps_each == case.steps_each - 1:
            if visits:
                apart.append(distance(sw.world, world.rank, visits[result.step // case.steps_each]))
            if ends:
                ends.leave()

    Trainer(job, data, sw, after).run(case.steps)
    moved = ends.found if ends else []
    return {"steps": steps, "apart": apart, "layouts": places, "switches": books.switches, "moved": moved}
