"""What a switch could not carry is refused by name: at the start where it can be known, else at the switch."""

import time
from dataclasses import replace

import torch
import torch.distributed as dist
from tests.dist.foreign import (
    Books,
    Net,
    Scaler,
    Shadow,
    build_net,
    everywhere,
    groups_of,
    idle,
    shard,
    switcher,
    until_ended,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from dynatrain.train import blueprint
from dynatrain.train.agreement import SwitchAbortedError


def with_optimizer(make):
    """``build_net`` with another optimizer."""

    def build(mesh, _layout):
        net = shard(Net().double(), mesh)
        return net, make(net)

    return build


def with_net(change):
    """``build_net`` with something done to the net after sharding."""

    def build(mesh, _layout):
        net = shard(Net().double(), mesh)
        change(net, mesh)
        return net, torch.optim.AdamW(groups_of(net))

    return build


def build_short(mesh, _layout):
    net = shard(Net().bfloat16(), mesh)
    return net, torch.optim.AdamW(groups_of(net))


def counted_in_state(net):
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.state["global_step"] = 5
    return optimizer


def summed_on_itself(net):
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.total = torch.zeros(())
    return optimizer


def counted_in_python(net):
    """An optimizer of a user's who has loaded a checkpoint of old, with its steps as Python numbers."""
    optimizer = torch.optim.AdamW(groups_of(net))
    for group in optimizer.param_groups:
        for param in group["params"]:
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": 3} | moments
    return optimizer


def same_name(_part, path):
    return "weight" if path in {"inside.weight", "out.weight"} else path


def split_by_hand(net, mesh):
    rank = dist.get_rank()
    local = torch.zeros((1, 9)[rank], 2, dtype=torch.float64)
    value = DTensor.from_local(local, mesh["fsdp"], [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1))
    net.extra = nn.Module()
    net.extra.odd = nn.Parameter(value)


def part_by_hand(net, _mesh):
    net.extra = nn.Module()
    net.extra.odd = nn.Parameter(torch.zeros((1, 9)[dist.get_rank()], 2))


def pack(net, mesh):
    """Gate and up in one, as packed linear layers have them."""
    net.gate_up = nn.Linear(4, 8, bias=False)
    cut = distribute_tensor(net.gate_up.weight.detach(), mesh["tp"], [_StridedShard(0, split_factor=2)])
    net.gate_up.weight = nn.Parameter(cut)


def cut_from_the_left(net, mesh):
    """Cut by fsdp first, then tp: FSDP2 cuts what tp has left."""
    net.extra = nn.Linear(4, 8, bias=False)
    cut = distribute_tensor(net.extra.weight.detach(), mesh["fsdp", "tp"], [Shard(0), Shard(0)])
    net.extra.weight = nn.Parameter(cut)


def share_memory(net, _mesh):
    both = torch.zeros(2, 3)
    net.register_buffer("one", both[0])
    net.register_buffer("other", both[1])


def build_replicated(_mesh, _layout):
    net = DistributedDataParallel(Net().double())
    return net, torch.optim.AdamW(groups_of(net))


def hook_a_parameter(net, _mesh):
    net.out.bias.register_hook(lambda grad: grad)


class Listed(Shadow):
    """An average that numbers its tensors."""

    def state_dict(self):
        return {"shadow": list(self.entries.values())}


class Copying(Shadow):
    """An average that copies what it loads into the tensors it has."""

    def load_state_dict(self, state):
        for name, value in state["shadow"].items():
            self.entries[name].copy_(value)


class Forgetful(Shadow):
    """An average that takes over all but one tensor."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "shadow": {k: v for k, v in state["shadow"].items() if k != "out.bias"}})


class Warmup(Scaler):
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer


class PerRank(Scaler):
    """Common state that is not."""

    def __init__(self):
        super().__init__()
        self.scale += dist.get_rank()


AT_START = {
    "optimizer": (
        {"build": with_optimizer(lambda net: torch.optim.RMSprop(net.parameters(), lr=0.1))},
        ["RMSprop", "no state schema", "AdamW", "SGD", "Muon"],
    ),
    "a Python step": (
        {"build": with_optimizer(counted_in_python)},
        ["state step of out.weight is int; its schema says shape ()"],
    ),
    "state of no parameter": (
        {"build": with_optimizer(counted_in_state)},
        ["the optimizer's state has 'global_step' (int), which belongs to no parameter", "self.t = 0"],
    ),
    "a tensor on the optimizer": (
        {"build": with_optimizer(summed_on_itself)},
        ["total of optimizer AdamW: tensors on an optimizer itself", "meta", "state[param]"],
    ),
    "foreign parameters": (
        {"build": with_optimizer(lambda _net: torch.optim.AdamW([nn.Parameter(torch.zeros(3))]))},
        ["1 parameter(s) that its model does not have"],
    ),
    "one name for two": ({"names": same_name}, ["two tensors are called weight", "inside.weight", "out.weight"]),
    "a 1/9 split": (
        {"build": with_net(split_by_hand)},
        ["extra.odd: rank", "(10, 2)", "its box is", "ceil-sized"],
    ),
    "a 1/9 split by hand": (
        {"build": with_net(part_by_hand), "layout": "tp2", "sharded": {"odd": 0}},
        ["extra.odd: rank 0 has (2, 2) cut (('tp', 0),)", "rank 1 has (18, 2)"],
    ),
    "no such dim": ({"sharded": {"out.bias": 1}}, ["out.bias has shape (3,) and no dim 1"]),
    "sharded twice": (
        {"sharded": {"blocks.0.0": 0}, "layout": "tp2"},
        ["blocks.0.0.weight is declared sharded by hand, and is a DTensor that tp cuts"],
    ),
    "sharded, and not there": ({"sharded": {"ou": 0}}, ["no tensor has ou in its name"]),
    "a packed shard": (
        {"build": with_net(pack), "layout": "tp2"},
        ["gate_up.weight: tp cuts 2 strips of dim 0", "segments"],
    ),
    "no master": ({"build": build_short}, ["out.weight (torch.bfloat16)", "AdamW keeps no master", "float32"]),
    "one memory for two": ({"build": with_net(share_memory)}, ["one", "other", "shares its storage"]),
    "a parameter's hook": ({"build": with_net(hook_a_parameter)}, ["<lambda>", "parameter out.bias", "module hook"]),
    "DDP": (
        {"build": build_replicated, "layout": "dp2"},
        ["DistributedDataParallel around module (the whole) hangs on its parameters", "fully_shard"],
    ),
    "too few ranks": ({"layout": "fsdp3"}, ["fsdp3", "3 ranks", "the world has 2", "nearest legal"]),
    "a schedule that is not": ({"schedule": {4: "fsdp2.tp2"}}, ["4 ranks", "the world has 2"]),
    "another mathematics": ({"schedule": {4: "tp2"}}, ["1 data ranks", "fsdp2 has 2", "means", "free", "nearest"]),
}

REGISTERED = {
    "a list": (lambda sw: Listed(sw.model, local=True), ["shadow", "list of tensors", "parameters' names"]),
    "a copier": (lambda sw: Copying(sw.model, local=False), ["copies shadow.inside.weight into the tensor"]),
    "a forgetter": (lambda sw: Forgetful(sw.model, local=False), ["dropped shadow.out.bias"]),
    "whole averages": (lambda _sw: AveragedModel(Net().double()), ["module.inside.weight has shape (6, 5)"]),
    "a scheduler": (lambda sw: LambdaLR(sw.optimizer, lambda _: 1.0), ["belongs to the optimizer", "factory"]),
    "another's scheduler": (lambda sw: Warmup(sw.optimizer), ["thing holds the optimizer (optimizer)", "a factory"]),
    "common state": (lambda _sw: PerRank(), ["the common state of thing", "ranks [1] differ from rank 0"]),
}


def refusal(act):
    """What ``act`` says when it raises a mistake of the user's; empty where it does not."""
    try:
        act()
    except (ValueError, SwitchAbortedError) as error:
        return str(error)
    return ""


def missing(said):
    """What the refusals do not say, of what they should."""
    expected = {name: words for name, (_, words) in (AT_START | REGISTERED).items()}
    return {name: (said[name], words) for name, words in expected.items() if not all(w in said[name] for w in words)}


def test_what_cannot_be_switched_is_refused_at_the_start_by_name():
    def work(world):
        said = {}
        for name, (changed, _) in AT_START.items():
            settings = {"name": name, "build": build_net, "layout": "fsdp2"} | changed
            said[name] = refusal(lambda s=settings: switcher(world, **s))
        for name, (make, _) in REGISTERED.items():
            sw = switcher(world, build_net, "fsdp2", name=name)
            said[name] = refusal(lambda s=sw, m=make: s.register("thing", m(s)))
            sw.close()
        sw = switcher(world, build_net, "fsdp2", name="labels")
        sw.register("thing", Scaler())
        said["a label twice"] = refusal(lambda: sw.register("thing", Scaler()))
        said["a request"] = refusal(lambda: sw.request("tp2"))
        return said

    for said in everywhere(2, work):
        assert missing(said) == {}
        assert "'thing' cannot be a label" in said["a label twice"]
        assert "1 data ranks" in said["a request"]


def test_a_tensor_that_fsdp_cuts_before_tp_is_refused_though_its_parts_have_the_right_shape():
    def work(world):
        return refusal(lambda: switcher(world, with_net(cut_from_the_left), "fsdp2.tp2"))

    for said in everywhere(4, work):
        assert "extra.weight: fsdp cuts dim 0 before tp does" in said


def test_what_one_rank_alone_refuses_ends_the_start_on_all_of_them_at_once_and_names_it():
    def one_odd(net, mesh):
        if dist.get_rank() == 1:
            split_by_hand(net, mesh)

    class Fussy(Scaler):
        def load_state_dict(self, state):
            if dist.get_rank() == 1:
                raise RuntimeError("no room here")
            super().load_state_dict(state)

    def work(world):
        began, said = time.monotonic(), {}
        for name, build in (("a shard", with_net(one_odd)), ("a build", with_net(one_memory))):
            said[name] = refusal(lambda n=name, b=build: switcher(world, b, "fsdp2", name=n))
        sw = switcher(world, build_net, "fsdp2", name="late")
        said["an object"] = refusal(lambda: sw.register("thing", Fussy()))
        return said, time.monotonic() - began

    def one_memory(net, mesh):
        if dist.get_rank() == 1:
            share_memory(net, mesh)
        else:  # the same tensors, each with memory of its own
            net.register_buffer("one", torch.zeros(3))
            net.register_buffer("other", torch.zeros(3))

    (first, took), (second, _) = everywhere(2, work)
    assert first == second
    assert took < 10  # the deadline is 15 s each
    assert first["a shard"].startswith("rank 1: UnplacedTensorError: extra.odd: rank 1 holds (9, 2) of (10, 2)")
    assert first["a build"].startswith("rank 1: UnplacedTensorError: ")
    assert "shares its storage" in first["a build"]
    assert "rank 1" in first["an object"]
    assert "no room here" in first["an object"]


def test_a_loop_that_shares_one_batch_or_normalises_itself_may_change_its_data_ranks():
    def summed(mesh, layout):
        net, optimizer = build_net(mesh, layout)
        for module in (*net.blocks, net):
            module.set_gradient_divide_factor(1.0)
        return net, optimizer

    def work(world):
        books = Books()
        for name, build, settings in (("free", build_net, {"data_parallel": "free"}), ("summed", summed, {})):
            sw = switcher(world, build, "fsdp2", name=name, recorder=books, **settings)
            sw.request("tp2")
            until_ended(sw, books)
            sw.close()
        return books.ends

    for ends in everywhere(2, work):
        assert [end[:2] for end in ends] == [("tp2", "committed")] * 2


def forgetting(tensor, state):
    """A planner that leaves one state of one tensor out of all moves."""
    rank_plan = blueprint.rank_plan

    def planner(catalogue, *args, **options):
        part = rank_plan(catalogue, *args, **options)
        index = next(i for i, t in enumerate(catalogue) if t.name == tensor)
        number = [s.name for s in catalogue[index].states].index(state)

        def left(move):
            kept = tuple(n for n in move.states if (move.tensor, n) != (index, number))
            return replace(move, states=kept)

        moves = {name: tuple(map(left, getattr(part, name))) for name in ("sends", "receives", "relays")}
        return replace(part, **moves)

    return planner


def test_what_turns_up_later_aborts_the_switch_by_name_and_the_loop_goes_on():
    def work(world):
        books = Books()
        sw = switcher(world, build_net, "fsdp2", recorder=books)
        said = {}

        def attempt(name, target="dp2"):
            before = {key: whole(entry.value) for key, entry in sw.world.found.items()}
            sw.request(target)
            ((_, outcome, reason),) = until_ended(sw, books)
            after = {key: whole(entry.value) for key, entry in sw.world.found.items()}
            said[name] = (outcome, reason, all(map(torch.equal, before.values(), after.values())))

        handle = sw.model.out.register_state_dict_pre_hook(lambda *_: None)
        attempt("an unknown hook")
        handle.remove()

        group = sw.optimizer.param_groups[0]
        group["lr"] += world.rank
        attempt("rates that differ")
        group["lr"] = 0.01

        state = sw.optimizer.state[sw.model.out.weight]
        moment = state.pop("exp_avg_sq")
        attempt("a moment that is gone")
        state["exp_avg_sq"] = moment

        planner, blueprint.rank_plan = blueprint.rank_plan, forgetting("out.weight", "exp_avg_sq")
        attempt("a moment that is not planned")
        blueprint.rank_plan = planner

        with torch.no_grad():
            sw.model.seen += world.rank
        attempt("copies that differ")
        sw.model.seen.zero_()

        step = sw.optimizer.step
        LambdaLR(sw.optimizer, lambda _: 1.0)
        attempt("an unknown scheduler")
        sw.optimizer.step = step
        attempt("nothing")
        return said

    for said in everywhere(2, work):
        outcome, reason, _ = said.pop("nothing")
        assert (outcome, reason) == ("committed", "")
        for name, (outcome, reason, same) in said.items():
            assert (outcome, same) == ("aborted", True), (name, reason)
        assert "module out" in said["an unknown hook"][1]
        assert "options of parameter group 0" in said["rates that differ"][1]
        assert "out.weight" in said["a moment that is gone"][1]
        assert "out.weight.exp_avg_sq" in said["a moment that is not planned"][1]
        assert "seen" in said["copies that differ"][1]
        assert "scheduler" in said["an unknown scheduler"][1]


def test_a_build_that_makes_another_model_aborts_the_switch_by_name():
    def build(mesh, layout):
        net = Net(hidden=10 if layout.size("fsdp") > 1 else 12).double()
        if layout.size("fsdp") == 1:
            net.more = nn.Linear(2, 2).double()
        shard(net, mesh)
        return net, torch.optim.AdamW(groups_of(net))

    def regroup(mesh, layout):
        net = shard(Net().double(), mesh)
        groups = groups_of(net) if layout.size("fsdp") > 1 else groups_of(net)[::-1]
        return net, torch.optim.AdamW(groups)

    def work(world):
        books = Books()
        for name, make in (("shapes", build), ("groups", regroup)):
            sw = switcher(world, make, "fsdp2", name=name, recorder=books)
            sw.request("dp2")
            until_ended(sw, books)
            for _ in idle(sw, 1):
                pass
            sw.close()
        return [reason for _, outcome, reason in books.ends if outcome == "aborted"]

    for shapes, groups in everywhere(2, work):
        assert "blocks.0.0.weight with shape (12, 6), the old model has (10, 6)" in shapes
        assert "more.weight, which the old model has not" in shapes
        assert "parameter group" in groups
