"""Each cell of the tables in docs/what-can-switch.md: there and back on two real ranks, beside the run of one process.

A run begins in the axis' home, goes to the axis at a step's edge in ``tight``, and back inside a step in ``keep``.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from tests.cells import AXES, EXACT, HOME, STATES
from tests.jobs import Books, Case, Ends, everywhere, switcher
from tests.pasted import pasted, same
from tests.shapes import latent_shape
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dynatrain.cluster.board import Board
from dynatrain.models import decoder
from dynatrain.models.decoder import DecoderLayer, canonical_name
from dynatrain.models.names import strip_wrappers
from dynatrain.space.box import whole, within
from dynatrain.train import parallel
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.muon import Muon
from dynatrain.train.optimizers.several import Several
from dynatrain.train.trainer import Job, Trainer

SHAPE = latent_shape(num_hidden_layers=4, router_aux_loss_coef=0.1)
"""Experts, with counters that balance them."""
CASE = Case(tour=(), size=2, shape=SHAPE, steps_each=2)
STEPS, AFTER = 3 * CASE.steps_each, 2
TRIED_ALWAYS = ("pp-zbv",)
"""Columns whose states are tried every time; the others are the sweep's."""
RANK = 4
"""Of adapters."""


class Scaled(nn.Module):
    """Keeps a history in no parameter and no buffer, as layers in fp8 do."""

    def __init__(self):
        super().__init__()
        self.history, self.margin = torch.zeros(4, device="cpu"), 0  # also where parameters are on meta

    def get_extra_state(self):
        return {"history": self.history, "margin": self.margin}

    def set_extra_state(self, state):
        self.history, self.margin = state["history"], state["margin"]


class Adapted(DecoderLayer):
    """A block of a decoder with frozen attention, an adapter beside it, and one of each other kind of state."""

    def __init__(self, shape, layer, *others):
        super().__init__(shape, layer, *others)
        self.self_attn.requires_grad_(requires_grad=False)
        if layer == shape.num_hidden_layers - 1:
            self.mlp.requires_grad_(requires_grad=False)
        self.lora_down = nn.Linear(shape.hidden_size, RANK, bias=False)
        self.lora_up = nn.Linear(RANK, shape.hidden_size, bias=False)
        self.never = nn.Linear(shape.hidden_size, 5, bias=False)
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("scale", torch.zeros(3), persistent=False)
        self.fp8 = Scaled()

    def forward(self, x, samples, documents=None):
        return super().forward(x, samples, documents) + self.lora_up(self.lora_down(x))


def adapt():
    """Have every decoder of this process made of such blocks."""
    decoder.DecoderLayer = Adapted
    planned = parallel.tensor_plan

    def plan(part, layout):
        between = parallel._between(layout)
        more = {"lora_down": ColwiseParallel(input_layouts=between), "lora_up": RowwiseParallel(output_layouts=between)}
        return planned(part, layout) | {
            f"layers.{number}.{name}": style for number in part.layers for name, style in more.items()
        }

    parallel.tensor_plan = plan


class AdaptedJob(Job):
    """Four optimizers, of which one has an empty group, and another the parameters that get no gradient."""

    def build(self, mesh, layout):
        parts, _ = super().build(mesh, layout)
        named = {param: canonical_name(part, path) for part in parts for path, param in part.named_parameters()}
        groups = {"adapters": [], "ends": [], "vectors": [], "never": [], "rest": []}
        for param, name in named.items():
            if param.requires_grad:
                kind = "adapters" if "lora" in name else "never" if "never" in name else "rest"
                kind = "ends" if name.startswith(("embed", "lm_head")) else "vectors" if param.ndim == 1 else kind
                groups[kind].append(param)
        rest = [
            {"params": groups["rest"], "weight_decay": 0.1},
            {"params": [], "lr": 1.0},
            {"params": groups["never"], "foreach": False},
        ]
        return parts, Several(
            [
                Muon([{"params": groups["adapters"]}], lr=1e-2),
                Adafactor([{"params": groups["ends"]}], lr=1e-2),
                torch.optim.SGD([{"params": groups["vectors"]}], lr=1e-2, momentum=0.9, foreach=False),
                torch.optim.AdamW(rest, lr=1e-2, foreach=False),
            ]
        )


class Average:
    """An average of what is trained, as DTensors or as plain shards."""

    def __init__(self, world, *, local):
        self.local, self.entries = local, {}
        self.entries = {name: value.clone() for name, value in self._now(world)}

    def _now(self, world):
        for name, entry in world.found.items():
            if isinstance(entry.value, nn.Parameter) and entry.value.requires_grad:
                value = entry.value.detach()
                yield name, value.to_local() if self.local else value

    @torch.no_grad()
    def update(self, world):
        for name, value in self._now(world):
            self.entries[name].lerp_(value, 0.1)

    def state_dict(self):
        return {"mean": dict(self.entries)}

    def load_state_dict(self, state):
        self.entries = dict(state["mean"])


class Scaler:
    """A scalar tensor and a count."""

    def __init__(self):
        self.scale, self.streak = torch.tensor(1024.0), 0

    def update(self):
        self.scale, self.streak = self.scale * 2, self.streak + 1

    def state_dict(self):
        return {"scale": self.scale, "streak": self.streak}

    def load_state_dict(self, state):
        self.scale, self.streak = state["scale"].clone(), state["streak"]


def means(world, name):
    """What a ``Switcher`` needs for itself, where a process has several after each other."""
    board = dist.TCPStore("127.0.0.1", world.store.port, is_master=False)
    return {
        "board": Board(dist.PrefixStore(f"board/{name}", board), world.size),
        "store": dist.PrefixStore(f"groups/{name}", world.store),
    }


@dataclass
class Ran:
    """What one run came to, as one rank saw it; ``moved`` is what it held right before and after each switch."""

    switches: list
    moved: list
    numbers: list
    values: dict
    common: dict


def run(world, job, tour, name, *, states=False):
    """``STEPS`` steps of ``job``; with ``states``, one of everything beside it."""
    books, numbers = Books(), []
    sw = switcher(job, world, tour[0], recorder=books, **means(world, name))
    things, ends = [], None if states else Ends(sw, world.rank)
    if states:
        averages = [Average(sw.world, local=local) for local in (False, True)]
        things = [*averages, Scaler()]
        for label, thing in zip(("ema", "local", "scaler"), things, strict=True):
            sw.register(label, thing)
    if len(tour) > 1:
        sw.request(tour[1], at=CASE.steps_each, mode="tight")
        sw.request(tour[0], at=2 * CASE.steps_each, after=AFTER, mode="keep")

    def after(result):
        numbers.append((result.loss, result.grad_norm))
        if ends and result.step == CASE.steps_each - 1:
            ends.leave()
        if states:
            for average in things[:2]:
                average.update(sw.world)
            things[2].update()
            for part in sw.parts:
                for block in part.layers.values():
                    block.seen += 1
                    block.scale += 2
                    block.fp8.history, block.fp8.margin = block.fp8.history + 1 / 3, result.step

    Trainer(job, CASE.data(), sw, after).run(STEPS)
    common = {"scaler": things[2].state_dict() | {"scale": things[2].scale.item()}} if states else {}
    common |= {
        strip_wrappers(part, path): (module.history.tolist(), module.margin)
        for part in sw.parts
        for path, module in part.named_modules()
        if isinstance(module, Scaled)
    }
    found = Ran(
        books.switches,
        ends.found if ends else [],
        numbers,
        {k: v.clone() for k, v in sw.world.values().items()},
        common,
    )
    return sw, found


def apart(sw, found, alone, rank):
    """``{(tensor, state): largest difference to the run of one process}``; holds that all that was there is there."""
    tensors = {tensor.name: tensor for tensor in sw.world.catalogue}
    states = {(tensor.name, state.name): state for tensor in sw.world.catalogue for state in tensor.states}
    assert states.keys() == alone.values.keys()
    distances = {}
    for key, value in found.values.items():
        box = sw.world.ownership.state_box(tensors[key[0]], states[key], rank)
        full = alone.values[key]
        part = full[within(box, whole(tuple(full.shape)))]
        assert (part.shape, part.dtype) == (value.shape, value.dtype)
        distances[key] = (part.double() - value.double()).abs().max().item() if value.numel() else 0.0
    return distances


def optimizer_job(name):
    job = CASE.job()
    return replace(job, optimizer=replace(job.optimizer, name=name, lr=1e-2, total_steps=STEPS))


def adapted_job():
    job = CASE.job()
    given = {name: getattr(job, name) for name in Job.__slots__}
    return AdaptedJob(**given | {"optimizer": replace(job.optimizer, total_steps=STEPS)})


def tour_of(axis):
    return HOME.get(axis, "fsdp2"), AXES[axis]


@pytest.fixture(scope="module")
def optimizers_alone():
    def work(world):
        found = {}
        for name in EXACT:
            sw, found[name] = run(world, optimizer_job(name), ("dp1",), name)
            sw.close()
        return found

    return everywhere(1, work, 120)[0]


@pytest.fixture(scope="module")
def optimizer_runs(optimizers_alone):
    """``{axis: [{optimizer: (its run, distances)} of each rank]}``, made when asked for."""
    found = {}

    def work(world, axis):
        told = {}
        for name in EXACT:
            sw, ran = run(world, optimizer_job(name), tour_of(axis), name)
            told[name] = ran, apart(sw, ran, optimizers_alone[name], world.rank)
            sw.close()
        return told

    def of(axis):
        if axis not in found:
            found[axis] = everywhere(2, lambda world: work(world, axis), 200)
        return found[axis]

    return of


@pytest.fixture(scope="module")
def states_alone():
    def work(world):
        adapt()
        return run(world, adapted_job(), ("dp1",), "alone", states=True)[1]

    return everywhere(1, work, 120)[0]


@pytest.fixture(scope="module")
def state_runs(states_alone):
    """``{axis: [(the run, distances) of each rank]}``, made when asked for."""
    found = {}

    def work(world, axis):
        adapt()
        sw, ran = run(world, adapted_job(), tour_of(axis), axis, states=True)
        return ran, apart(sw, ran, states_alone, world.rank)

    def of(axis):
        if axis not in found:
            found[axis] = everywhere(2, lambda world: work(world, axis), 120)
        return found[axis]

    return of


def furthest(ran, alone):
    """The largest distance of any step's loss or norm."""
    return max(
        abs(a - b)
        for one, other in zip(ran.numbers, alone.numbers, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def assert_switched(ran):
    assert [(outcome, equal) for outcome, _, _, equal in ran.switches] == [("committed", True)] * 2, ran.switches


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", EXACT)
@pytest.mark.parametrize("axis", AXES)
def test_each_optimizer(axis, optimizer, optimizer_runs, optimizers_alone):
    ranks = [of_rank[optimizer] for of_rank in optimizer_runs(axis)]
    assert [len(ran.moved) for ran, _ in ranks] == [2, 2]
    for ends in zip(*(ran.moved for ran, _ in ranks), strict=True):
        before, after = (pasted(side) for side in zip(*ends, strict=True))
        assert before
        assert same(before, after) == []
    for ran, distances in ranks:
        assert_switched(ran)
        if EXACT[optimizer] != "bits":  # codes of a byte may flip at 1e-16
            assert max(distances.values()) <= 1e-12
            assert furthest(ran, optimizers_alone[optimizer]) <= 1e-12


def value(names, states=("param",)):
    """Picks ``(tensor, state)`` by what the tensor's name has in it."""
    return lambda name, state: state in states and any(one in name for one in names)


PICK = {
    "parameters": value(["embed", "mlp", "norm", "lm_head"]),
    "frozen parameters": value(["self_attn", f"layers.{SHAPE.num_hidden_layers - 1}.mlp"]),
    "adapters (LoRA)": lambda name, state: "lora" in name and state in {"param", "momentum_buffer"},
    "parameters without a gradient yet": lambda name, _: "never" in name,
    "several optimizers, with groups": lambda _, state: state not in {"param", "buffer"} and ".mean" not in state,
    "persistent buffers": value(["seen", "mlp.gate"], ["buffer"]),
    "other buffers": value(["scale"], ["buffer"]),
    "averages (EMA)": lambda _, state: state == "ema.mean",
    "averages as plain shards": lambda _, state: state == "local.mean",
}


def columns():
    return [axis if axis in TRIED_ALWAYS else pytest.param(axis, marks=pytest.mark.sweep) for axis in AXES]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("axis", columns())
def test_each_state(axis, state, state_runs, states_alone):
    for ran, distances in state_runs(axis):
        assert_switched(ran)
        if state in PICK:
            mine = [apart for key, apart in distances.items() if PICK[state](*key)]
            assert mine
            assert max(mine) <= (0 if STATES[state] == "bits" else 1e-12)
        elif state == "gradients inside a step":
            assert len(ran.numbers) == STEPS
            assert furthest(ran, states_alone) <= 1e-12
        elif state == "extra state":
            kept = {name: it for name, it in ran.common.items() if name.endswith("fp8")}
            assert kept
            assert kept.items() <= states_alone.common.items()
        else:
            assert ran.common["scaler"] == states_alone.common["scaler"]
