"""Toys over all axes: who owns what, by dealing out lists; plans between any two layouts, by stamps and the judge."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import toys
from tests.histogram import ALL, lacking
from tests.plans.materialize import expected, materialize

from dynatrain.judge.judge import judge_all, judge_whole
from dynatrain.layout.layout import AXES
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.hashes import plan_hash, received_hash, sent_hash
from dynatrain.plan.schedule import keep_schedule
from dynatrain.plan.storage import alike
from dynatrain.space.box import volume
from dynatrain.space.ownership import declared

few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SHORT = range(4)
LONG = range(100, 250)


def deal(things, ways, index):
    """Part ``index`` of a list in ceil-sized parts, the last ones short."""
    size = -(-len(things) // ways)
    return things[index * size : (index + 1) * size]


def split(layers, layout):
    """The layers of each stage: pinned, or dealt so that sizes differ by one, the light stages at both ends."""
    count = layout.size("pp") * layout.chunks
    sizes = list(layout.stages) or [layers // count + (i < layers % count) for i in range(count)]
    if not layout.stages:
        light = sorted(sizes)[: sizes.count(min(sizes))] if layers % count else []
        heavy = [max(sizes)] * (count - len(light))
        sizes = light[: (len(light) + 1) // 2] + heavy + light[(len(light) + 1) // 2 :]
    numbers = iter(range(layers))
    return [[next(numbers) for _ in range(size)] for size in sizes]


def places(layout):
    """``{rank: {axis: index}}``, experts' axes among them, by walking over the axes of the text."""
    found = {}
    names = [name for name, _ in layout.axes]
    for spot, at in enumerate(itertools.product(*(range(size) for _, size in layout.axes))):
        here = dict.fromkeys(AXES, 0) | dict(zip(names, at, strict=True))
        rank = layout.order[spot] if layout.order else spot
        found[rank] = here
    inner = list(itertools.product(*(range(layout.size(axis)) for axis in ("fsdp", "cp", "tp"))))
    left = len(inner) // (layout.ep * layout.etp)
    anew = list(itertools.product(range(left), range(layout.ep), range(layout.etp)))
    for here in found.values():
        efsdp, ep, etp = anew[inner.index((here["fsdp"], here["cp"], here["tp"]))]
        here |= {"efsdp": efsdp, "ep": ep, "etp": etp}
    return found


def indices(tensor, layout, here):
    """The global indices of a rank along each dim of a tensor of its stage."""
    found = [list(range(size)) for size in tensor.shape]
    ways = {axis: layout.size(axis) for axis in ("tp", "ep", "etp")}
    ways["fsdp"] = layout.size("fsdp") * layout.size("cp")
    ways["efsdp"] = layout.inner_ranks // (layout.ep * layout.etp)
    index = here | {"fsdp": here["fsdp"] * layout.size("cp") + here["cp"]}
    for axis, dim in tensor.cuts:
        name, most = axis.rstrip("0123456789"), axis.lstrip("efsdpt")
        parts, mine = ways[name], index[name]
        if most and int(most) < parts:
            parts, mine = int(most), mine // (parts // int(most))
        target = dim
        if name == "efsdp" and -(-tensor.shape[0] // layout.ep) < parts:
            (spare,) = {0, 1, 2} - {dim for _, dim in tensor.cuts}
            target = spare if tensor.shape[spare] % parts == 0 else dim
        found[target] = deal(found[target], parts, mine)
    return found


def stages_of(tensor, layout, layers):
    """The pp ranks that hold a tensor: stages go round them, or down and up again."""
    pp = layout.size("pp")
    on = list(range(pp)) + list(reversed(range(pp))) if layout.schedule == "zbv" else list(range(pp)) * layout.chunks
    held = split(layers, layout)
    return {
        on[0]
        if anchor == "first"
        else on[-1]
        if anchor == "last"
        else next(on[stage] for stage, numbers in enumerate(held) if anchor in numbers)
        for anchor in tensor.anchors
    }


def check_ownership(of, layout):
    catalogue = toys.catalogue(of)
    own = declared(catalogue, layout, of.layers)
    at = places(layout)

    for tensor in catalogue:
        stages = stages_of(tensor, layout, of.layers)
        forms = {state.form: state for state in tensor.states}.values()
        held = {state: np.zeros((own.copies(tensor, state), *tensor.state_shape(state)), int) for state in forms}
        for rank in range(layout.world_size):
            box = own.box(tensor, rank)
            assert (box is None) == (at[rank]["pp"] not in stages)
            if box is None:
                continue
            wanted = indices(tensor, layout, at[rank])
            assert [list(range(*ends)) for ends in box] == wanted or volume(box) == 0 == np.prod([*map(len, wanted)])
            for state in forms:
                mine = own.state_box(tensor, state, rank)
                assert mine == kept(state, box, tensor.shape)
                held[state][(own.copy_index(tensor, rank, state), *(slice(*ends) for ends in mine))] += 1
        assert all((count == 1).all() for count in held.values())


def kept(state, box, shape):
    """What a rank has of a state: the whole of a scalar, all blocks of its rows, nothing of dims that are gone."""
    if state.scalar:
        return ()
    if state.block:
        return (*box[:-1], (0, len(range(0, shape[-1], state.block))))
    return tuple(ends for dim, ends in enumerate(box) if dim not in state.reduced)


@few
@given(st.data())
def test_every_rank_owns_what_dealing_out_lists_gives_it(data):
    pick = toys.picked(data.draw)
    of = toys.toy(pick)
    check_ownership(of, toys.layout(pick, of, pick(range(1, 17))))


@pytest.mark.parametrize("seed", range(40))
def test_ranks_of_random_layouts_own_what_dealing_out_lists_gives_them(seed):
    """Most layouts that hypothesis draws are small; these are not."""
    pick = random.Random(seed).choice
    of = toys.toy(pick)
    check_ownership(of, toys.layout(pick, of, pick((6, 8, 12, 16))))


def check_plan(of, before, after, ranks_per_node):
    catalogue = toys.catalogue(of)
    old, new = declared(catalogue, before, of.layers), declared(catalogue, after, of.layers)
    schedule, adoptable = keep_schedule(catalogue, 1500), alike(catalogue, old, new)
    how = {"ranks_per_node": ranks_per_node, "adoptable": adoptable}
    world = max(before.world_size, after.world_size)
    parts = [rank_plan(catalogue, old, new, rank, schedule, **how) for rank in range(world)]

    found, wanted = materialize(catalogue, old, new, parts), expected(catalogue, new, world)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    verdict = judge_all(catalogue, old, new, parts)
    assert verdict.problems == ()
    whole = whole_plan(catalogue, old, new, schedule, **how)
    assert judge_whole(catalogue, old, new, whole) == verdict
    total = plan_hash(catalogue, whole.moves)
    assert sum(sent_hash(catalogue, part) for part in parts) % 2**64 == total
    assert sum(received_hash(catalogue, part) for part in parts) % 2**64 == total


def cases(seed):
    """Twenty switches of random toys: ``(toy, layout before, layout after, ranks per node)``."""
    pick = random.Random(seed).choice
    for _ in range(20):
        of = toys.toy(pick)
        yield of, *toys.pair(pick, of), pick((None, 2, 4))


@few
@given(st.data(), st.sampled_from([None, 2, 4]))
def test_a_plan_between_any_two_layouts_brings_every_stamp_to_its_place(data, ranks_per_node):
    pick = toys.picked(data.draw)
    of = toys.toy(pick)
    check_plan(of, *toys.pair(pick, of), ranks_per_node)


@pytest.mark.parametrize("seed", SHORT)
def test_plans_between_random_layouts_bring_every_stamp_to_its_place(seed):
    for case in cases(seed):
        check_plan(*case)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", LONG)
def test_many_plans_between_any_two_layouts_bring_every_stamp_to_its_place(seed):
    for case in cases(seed):
        check_plan(*case)


def test_the_cases_reach_every_axis_every_change_and_every_optimizer():
    drawn = [case[:3] for seed in (*SHORT, *LONG) for case in cases(seed)]

    assert len(drawn) >= 3000
    assert lacking(drawn) == []
    assert all(parse_layout(print_layout(one)) == one for case in drawn[:1000] for one in case[1:])


def test_a_generator_that_never_draws_an_axis_lacks_it(monkeypatch):
    layout = toys.layout

    def without_cp(*given):
        while (found := layout(*given)).size("cp") > 1:
            pass
        return found

    monkeypatch.setattr(toys, "layout", without_cp)
    drawn = [case[:3] for seed in range(20) for case in cases(seed)]
    missing = {line.partition(":")[0] for line in lacking(drawn)}

    assert "cp over 1" in missing
    assert missing >= {
        f"from {one} to {other}" for one, other in itertools.permutations(ALL, 2) if "cp" in (one, other)
    }
