"""Faults that users of other tools met with names, fused tensors and grouped heads, on models that are not ours.

Letters are the kinds of a list of public reports: L names, wrappers and adapters; D fused tensors; E grouped queries.
:data:`ROWS` says which test reproduces each; those that no other file has are here.
"""

import re

import pytest
import torch
import torch.distributed as dist
from tests.cli import ROOT
from tests.dist.foreign import Books, Net, build_net, everywhere, switcher, until_ended, whole
from tests.recipes import load, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from dynatrain.observe.checkpoints import newest
from dynatrain.train.saving import Saves

ROWS = {
    "L1": ["unit/test_names.py::test_any_nesting_around_blocks_and_around_the_whole_leaves_the_plain_names"],
    "L2": ["dist/test_foreign_faults.py::test_names_of_a_compiled_model_are_the_same_on_both_sides_of_a_switch"],
    "L4": [
        "dist/test_loop_recipes.py::test_adapters_on_a_frozen_checkpointed_model_train_through_switches_as_one_process"
    ],
    "L5": [
        "dist/test_foreign_faults.py::test_a_frozen_tower_has_its_place_and_no_state_in_any_number_of_parts",
        "dist/test_loop_recipes.py::test_pefts_adapters_train_through_switches_and_load_into_plain_peft",
    ],
    "L7": [
        "unit/test_names.py::test_a_rule_of_ones_own_sees_through_ddp",
        "dist/test_switcher_refusals.py::test_what_cannot_be_switched_is_refused_at_the_start_by_name",
    ],
    "L8": [
        "dist/test_kept_checkpoint.py::test_it_loads_into_another_layout_bit_by_bit",
        "dist/test_kept_checkpoint.py::test_a_later_schema_is_refused_by_name",
    ],
    "D1": ["dist/test_segments.py::test_a_fused_and_padded_model_trains_through_switches_as_the_plain_one"],
    "D2": [
        "dist/test_segments.py::test_there_and_back_moves_every_bit_and_nothing_of_the_padding",
        "dist/test_loop_recipes.py::test_every_tp_degree_of_an_example_is_one_process",
    ],
    "D4": ["dist/test_segments.py::test_a_fused_model_resumes_as_a_plain_one_and_back"],
    "D6": [
        "dist/test_segments.py::test_exchanged_segments_and_a_padded_row_that_leaks_are_caught_and_too_many_ways_are_refused",
        "unit/test_digest.py::test_order_and_place_count",
    ],
    "D7": [
        "dist/test_fused_experts.py::test_experts_with_gate_and_up_and_their_adapters_in_one_train_through_switches_as_plain_stacks"
    ],
    "D8": ["dist/test_loop_recipes.py::test_every_tp_degree_of_an_example_is_one_process"],
    "E1": ["dist/test_foreign_faults.py::test_more_tp_ranks_than_key_value_heads_are_refused_with_the_numbers"],
    "E3": [
        "dist/test_foreign_faults.py::test_copies_of_key_value_heads_stay_equal_and_are_one_tensor_of_the_job",
        "dist/test_foreign_faults.py::test_copies_that_each_keep_their_share_of_the_gradient_refuse_the_next_switch",
    ],
}


def test_the_table_names_tests_that_exist():
    for row in (one for rows in ROWS.values() for one in rows):
        file, name = row.split("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), row


def test_names_of_a_compiled_model_are_the_same_on_both_sides_of_a_switch():
    def build(mesh, _layout):
        net = Net().double()
        for number, block in enumerate(net.blocks):
            net.blocks[number] = fully_shard(torch.compile(block, backend="eager"), mesh=mesh["dp", "fsdp"])
        fully_shard(net, mesh=mesh["dp", "fsdp"])
        return net, torch.optim.AdamW(p for p in net.parameters() if p.requires_grad)

    def work(world):
        sw = switcher(world, build, "fsdp2", recorder=(books := Books()))
        names = [list(sw.world.found)]
        for layout in ("dp2", "fsdp2"):
            sw.model(torch.ones(2, 5).double()).sum().backward()  # code is made at the first forward
            sw.optimizer.step()
            sw.optimizer.zero_grad()
            sw.request(layout)
            until_ended(sw, books)
            names.append(list(sw.world.found))
        return names, [end[1] for end in books.ends]

    plain = Net()
    wanted = [name for name, _ in (*plain.named_parameters(), *plain.named_buffers())]
    for names, ends in everywhere(2, work):
        assert ends == ["committed"] * 2
        assert names == [wanted] * 3


@pytest.mark.sweep
def test_a_frozen_tower_has_its_place_and_no_state_in_any_number_of_parts(tmp_path):
    """Two parts, three, and from the files of two into three."""

    def held(sw):
        states = {name: dict(sw.optimizer.state.get(entry.value, {})) for name, entry in sw.world.found.items()}
        values = {name: whole(entry.value) for name, entry in sw.world.found.items()}
        return values, {name: sorted(kept) for name, kept in states.items()}

    def save(world):
        sw = switcher(world, build_net, "fsdp2", saves=Saves(root=tmp_path))
        sw.model(torch.ones(2, 5).double()).sum().backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        sw.save_now()
        return held(sw)

    def go_on(world):
        sw = switcher(world, build_net, "dp3", recorder=(books := Books()))
        sw.load(newest(tmp_path)[0])
        seen = [held(sw)]
        for layout in ("fsdp3", "dp3"):
            sw.request(layout)
            until_ended(sw, books)
            seen.append(held(sw))
        return seen, [end[1] for end in books.ends]

    (values, states), _ = everywhere(2, save)
    assert states["frozen.weight"] == []
    assert states["out.weight"] == ["exp_avg", "exp_avg_sq", "step"]
    for seen, ends in everywhere(3, go_on):
        assert ends == ["committed"] * 2
        for found, kept in seen:
            assert kept == states
            assert found.keys() == values.keys()
            assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.sweep
def test_more_tp_ranks_than_key_value_heads_are_refused_with_the_numbers():
    """By the recipe's build, as transformers itself fails in a reshape; the run goes on."""

    def work(world):
        recipe = load(world, "hf_models")
        dist.init_process_group()
        build = recipe["make_build"](recipe["MODELS"]["llama"])
        sw = switcher(world, build, "fsdp4", recorder=(books := Books()), data_parallel="free")
        for layout in ("tp4", "fsdp2.tp2"):
            sw.request(layout)
            until_ended(sw, books)
        return books.ends

    (_, refused, why), (_, then, _) = on_ranks(4, work)
    assert (refused, then) == ("aborted", "committed")
    assert "tp4 does not divide the 2 key/value heads; nearest is tp2" in why


WIDTH, HEADS, GROUPS, DIM = 8, 8, 2, 2


class Summed(torch.autograd.Function):
    """What all tp ranks have alike, and each uses a part of: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Grouped(nn.Module):
    """Eight query heads of two key/value heads: tp cuts the queries, and each of its ranks has all of the others."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.q, self.kv = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(WIDTH, GROUPS * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        q, kv = self.q(x).unflatten(-1, (-1, DIM)), self.kv(x).unflatten(-1, (GROUPS, DIM))
        first, many = 0, q.shape[-2]
        if self.group is not None:
            kv, first = Summed.apply(kv, self.group), self.group.rank() * many
        mine = kv[..., torch.arange(first, first + many) // (HEADS // GROUPS), :]
        return self.out((torch.tanh(q) * mine).flatten(-2))


def build_grouped(mesh, layout):
    tp = layout.size("tp") > 1
    net = Grouped(mesh.get_group("tp") if tp else None).double()
    if tp:
        parallelize_module(net, mesh["tp"], {"q": ColwiseParallel(), "out": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp", "fsdp"])
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(world, layout, tour):
    torch.manual_seed(0)
    books = Books()
    sw = switcher(world, build_grouped, layout, schedule=tour, data_parallel="free", recorder=books)
    for step in sw.steps(until=9):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        data = sw.world.mesh["dp", "fsdp"]
        mine = batch.chunk(data.size())[data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp")]
        functional.mse_loss(sw.model(mine), mine.roll(1, -1)).backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
    held = {name: whole(entry.value) for name, entry in sw.world.found.items()}
    return held, books.ends, [tensor.name for tensor in sw.world.catalogue]


@pytest.mark.sweep
def test_copies_of_key_value_heads_stay_equal_and_are_one_tensor_of_the_job():
    ((alone, _, names),) = everywhere(1, lambda world: train(world, "dp1", {}))
    for held, ends, found in everywhere(4, lambda world: train(world, "tp4", {3: "fsdp2.tp2", 6: "tp4"})):
        assert [end[:2] for end in ends] == [("fsdp2.tp2", "committed"), ("tp4", "committed")], ends
        assert found == names
        for name, value in alone.items():
            torch.testing.assert_close(held[name], value, rtol=0, atol=1e-12)


def test_copies_that_each_keep_their_share_of_the_gradient_refuse_the_next_switch(monkeypatch):
    monkeypatch.setattr(Summed, "backward", staticmethod(lambda _ctx, grad: (grad, None)))
    for _, ((_, outcome, why),), _ in everywhere(2, lambda world: train(world, "tp2", {3: "fsdp2"})):
        assert outcome == "aborted"
        assert "kv.weight" in why
        assert "differed before the switch" in why
