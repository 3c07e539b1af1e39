"""Ranks that go from layout to layout without training, and count what a switch does."""

import time
from contextlib import ExitStack

import torch
import torch.distributed as dist
from tests.addresses import fill, misplaced
from tests.jobs import meeting
from tests.ledgers import Alive, CountingTransport
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynatrain.execute import exchange, wire
from dynatrain.execute.exchange import staging_bound
from dynatrain.execute.pieces import Pool
from dynatrain.execute.transport import GroupTransport
from dynatrain.space.box import volume
from dynatrain.space.tensor import ITEMSIZE
from dynatrain.train import attempt as attempts
from dynatrain.train.switcher import Switcher
from dynatrain.train.torch_private import local_tensor

WIDTH, INNER, WORDS, LAYERS = 22, 46, 61, 4
"""Sizes of the model, uneven in every cut."""

BLOCK = {"norm": (WIDTH,), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
TENSORS = (
    {"embed.weight": (WORDS, WIDTH)}
    | {f"layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in BLOCK.items()}
    | {f"layers.{layer}.seen": (INNER,) for layer in range(LAYERS)}
    | {"norm.weight": (WIDTH,), "head.weight": (WORDS, WIDTH)}
)
"""Shapes of all tensors of the model."""

BUNDLE = 4096
"""Bytes that one pair has under way at once, in these tests."""

SMALLEST = 8 * WIDTH * INNER
"""Bytes of the smallest matrix: more than a bundle."""

FEW = 1024
"""Bytes of scalars and the like that an operation may leave for a moment."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(INNER))


class Part(nn.Module):
    """A pipeline part of a model that is never run: nothing but its tensors matters here."""

    def __init__(self, layers, *, first, last):
        super().__init__()
        if first:
            self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})
        if last:
            self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)


def build(mesh, layout):
    """The user's build, as the tutorials have it."""
    stage, stages = mesh.get_local_rank("pp"), layout.size("pp")
    layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
    part = Part(layers, first=stage == 0, last=stage == stages - 1).double()
    if layout.size("tp") > 1:
        plan = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
        plan |= {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(part, mesh["tp"], plan)
    for block in part.layers.values():
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(part, mesh=mesh["fsdp"])
    return part, torch.optim.AdamW(part.parameters(), lr=1e-3, foreach=False)


class Shadows:
    """An EMA-like object: one tensor per parameter, as a DTensor like it or as the plain local shard."""

    def __init__(self, key, *, local):
        self.key, self.local, self.held = key, local, {}

    def follow(self, part):
        values = {name: value.detach().clone() for name, value in part.named_parameters()}
        self.held = {name: local_tensor(value) if self.local else value for name, value in values.items()}

    def state_dict(self):
        return {self.key: dict(self.held), "decay": 0.99}

    def load_state_dict(self, state):
        assert state["decay"] == 0.99
        self.held = dict(state[self.key])


class Scaler:
    """A GradScaler-like object: a scale and a count, one of them a tensor."""

    def __init__(self):
        self.scale, self.streak = torch.tensor(65536.0), 3

    def state_dict(self):
        return {"scale": self.scale, "growth": {"streak": self.streak}}

    def load_state_dict(self, state):
        self.scale, self.streak = state["scale"].clone(), state["growth"]["streak"]


class Walker:
    """One rank that goes from layout to layout without training, and what it counted at each switch.

    Every element of its state holds its stamp; new memory is poisoned.
    """

    def __init__(self, world, start, *, transport=GroupTransport, **more):
        wire.BUNDLE_BYTES = wire.PACK_BYTES = exchange.SCRATCH_BYTES = BUNDLE
        self.world, self.books, self.transports = world, [], []
        shadows = (Shadows("shadow", local=False), Shadows("local", local=True))
        self.scaler = Scaler()

        def first_build(mesh, layout):
            part, optimizer = build(mesh, layout)
            if not next(part.parameters()).is_meta:
                for one in shadows:
                    one.follow(part)
            return part, optimizer

        def counted(group, members):
            self.transports.append(CountingTransport(transport(group, members)))
            return self.transports[-1]

        self._measure_moves()
        self.sw = Switcher(
            first_build,
            layout=start,
            state={"ema": shadows[0], "mean": shadows[1], "scaler": self.scaler},
            recorder=self,
            memory=Pool(poison=True),
            transport=counted,
            data_parallel="own",
            **meeting(world) | more,
        )
        self.steps = self.sw.steps(until=10**9)
        self.fill(start)

    def fill(self, text):
        fill(self.sw.world.values(), TENSORS, text, self.world.rank, LAYERS)

    def misplaced(self, text):
        values, model = self.sw.world.values(), self.sw.model
        values |= {(name, "param"): local_tensor(value) for name, value in model.named_parameters()}  # as it is used
        values |= {(name, "buffer"): value for name, value in model.named_buffers()}
        return misplaced(values, TENSORS, text, self.world.rank, LAYERS)

    def go(self, text, mode="keep", at=-1):
        """Switch; returns what became of it."""
        before = len(self.books)
        self.sw.request(text, mode=mode, at=at)
        for _ in self.steps:
            dist.barrier()  # every training step couples all ranks
            if len(self.books) > before:
                return self.books[-1]
            time.sleep(0.005)
        return None

    def _measure_moves(self):
        """From before the first transfer until everything is bound."""
        run = attempts.Attempt._run

        def running(attempt):
            make = attempts.Executor  # now: a test may have planted another one
            with ExitStack() as stack:

                def making(**given):
                    targets = [piece.tensor for piece in attempt._targets.values()]
                    self.alive = stack.enter_context(Alive([*attempt.old.values().values(), *targets]))
                    return make(**given)

                attempts.Executor = making
                stack.callback(setattr, attempts, "Executor", make)
                run(attempt)

        attempts.Attempt._run = running

    # The recorder's face.

    def announced(self, order, step):
        pass

    def step_ended(self, at):
        pass

    def ended(self, attempt, outcome, reason, step, told):  # noqa: ARG002
        blueprint = attempt.blueprint
        book = {"outcome": outcome, "reason": reason, "equal": attempt.report is not None and attempt.report.equal}
        if outcome == "committed":
            routes = attempt._moves.routes  # as its transport carries them
            ledger = attempt._executor.ledger
            book |= {
                "mode": blueprint.part.schedule.mode,
                "sent": self.transports[-1].sent,
                "received": self.transports[-1].received,
                "relaid": ledger[self.world.rank, self.world.rank],
                "ledger": {pair: size for pair, size in ledger.items() if pair[0] != pair[1]},
                "planned": dict(blueprint.summary.pairs) if blueprint.summary else None,
                "planned_relaid": blueprint.summary.relaid if blueprint.summary else None,
                "moves": _bytes_of(blueprint.part, attempt.old.catalogue),
                "peak": self.alive.peak,
                "largest": self.alive.largest(piece.tensor for piece in attempt._executor.new.values()),
                "pieces": blueprint.peak[self.world.rank],
                "staging": staging_bound(routes),
                "addresses": max((_words(route) for route in routes), default=0),
                "checksums": 2 * 8 * sum(len(i) for r in routes for at in (r.sends, r.receives) for i in at.values()),
            }
        self.books.append(book)


def _words(route):
    """Bytes in which ranks tell each other where the items of a round lie: an address and the strides of each."""
    return sum(8 * (1 + len(item.box)) for at in (route.sends, route.receives) for of in at.values() for item in of)


def _bytes_of(part, tensors):
    """``{(src, dst): bytes}`` of one rank's moves."""
    found = {}
    for move in (*part.sends, *part.receives):
        width = sum(ITEMSIZE[tensors[move.tensor].states[state].dtype] for state in move.states)
        found[move.src, move.dst] = found.get((move.src, move.dst), 0) + volume(move.box) * width
    return found
