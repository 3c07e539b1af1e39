"""Who leaves, who comes, and where; and which sizes a world may have."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain.cluster.membership import MembershipError, next_world
from dynatrain.layout.form import LayoutError
from dynatrain.layout.resize import resized
from dynatrain.layout.sizes import Sizes
from dynatrain.layout.text import parse_layout
from dynatrain.space.presets import PRESETS

FOUR = (0, 1, 2, 3)
ALONE = dict.fromkeys(FOUR, 0)


def following(size, leave=(), *, world=FOUR, nodes=ALONE, free=None, first=4):
    found = next_world(world, nodes, size=size, leave=leave, free={0: 8} if free is None else free, first=first)
    return found.new, found.leavers, dict(found.newcomers)


def test_the_highest_ranks_leave_where_nobody_is_named():
    assert following(2) == ((0, 1), (2, 3), {})


def test_those_who_are_named_leave_first():
    assert following(3, [1]) == ((0, 2, 3), (1,), {})
    assert following(2, [0]) == ((1, 2), (0, 3), {})


def test_newcomers_come_behind_and_have_new_numbers():
    assert following(6) == ((0, 1, 2, 3, 4, 5), (), {4: 0, 5: 0})
    assert following(4, [2]) == ((0, 1, 3, 4), (2,), {4: 0})
    assert following(3, world=(1, 4), nodes={1: 0, 4: 0}, first=9) == ((1, 4, 9), (), {9: 0})


def test_on_several_nodes_a_newcomer_stands_behind_its_node():
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    assert following(5, nodes=nodes, free={0: 1, 1: 1}) == ((0, 1, 4, 2, 3), (), {4: 0})
    assert following(6, [0], nodes=nodes, free={0: 2, 1: 2}) == ((1, 4, 5, 2, 3, 6), (0,), {4: 0, 5: 0, 6: 1})
    assert following(3, [0, 1], nodes=nodes, free={0: 1, 1: 0}) == ((2, 3, 4), (0, 1), {4: 0})


@pytest.mark.parametrize(
    ("given_numbers", "said"),
    [
        ({"size": 2, "leave": FOUR}, "all 4 ranks would leave; at least one stays"),
        ({"size": 0}, "a world of 0 ranks; at least 1"),
        ({"size": 3, "leave": [7, 9]}, "members [7, 9] are not in the world; it has [0, 1, 2, 3]"),
        ({"size": 8, "free": {0: 1, 1: 1}}, "8 ranks need 2 more places than are free; nearest: 6 ranks"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_do(given_numbers, said):
    with pytest.raises(MembershipError) as refusal:
        following(**given_numbers)
    assert str(refusal.value).startswith(said)


@settings(deadline=None)
@given(st.data())
def test_any_row_of_worlds_keeps_order_neighbours_and_numbers(data):
    nodes = {member: member % 3 for member in sorted(range(6), key=lambda member: member % 3)}
    world, first, places = tuple(nodes), 6, dict.fromkeys(range(3), 4)
    for _ in range(6):
        leave = set(data.draw(st.lists(st.sampled_from(world), max_size=len(world) - 1, unique=True)))
        free = {node: room - sum(nodes[member] == node for member in world) for node, room in places.items()}
        size = data.draw(st.integers(1, len(world) - len(leave) + sum(free.values())))
        found = next_world(world, nodes, size=size, leave=leave, free=free, first=first)

        assert len(found.new) == len({*found.new}) == size
        stay = [member for member in world if member in found.new]
        assert [member for member in found.new if member in world] == stay
        assert found.new[0] == stay[0]
        assert found.leavers == tuple(member for member in world if member not in stay)
        assert leave <= {*found.leavers}
        assert not {*found.newcomers} & {*nodes}
        assert {*stay} | {*found.newcomers} == {*found.new}
        nodes |= found.newcomers
        assert len({nodes[member] for member in found.new}) == len(list(groupby(nodes[member] for member in found.new)))
        assert all(list(found.newcomers.values()).count(node) <= room for node, room in free.items())
        world, first = found.new, first + len(found.newcomers)


EVEN = Sizes(min=2, max=8, step=2)
LISTED = Sizes(sizes=(1, 4, 6))


@pytest.mark.parametrize(
    ("sizes", "size", "said"),
    [
        (EVEN, 4, ""),
        (EVEN, 5, "5 ranks are not allowed: world.step = 2; nearest: 4 or 6"),
        (EVEN, 1, "1 ranks are not allowed: world.min = 2, world.step = 2; nearest: 2"),
        (EVEN, 11, "11 ranks are not allowed: world.max = 8, world.step = 2; nearest: 8"),
        (LISTED, 6, ""),
        (LISTED, 5, "5 ranks are not allowed: world.sizes = [1, 4, 6]; nearest: 4 or 6"),
        (LISTED, 9, "9 ranks are not allowed: world.sizes = [1, 4, 6]; nearest: 6"),
        (Sizes(min=3), 2, "2 ranks are not allowed: world.min = 3; nearest: 3"),
        (Sizes(), 65000, ""),
    ],
)
def test_a_size_is_held_against_the_settings(sizes, size, said):
    assert sizes.problem(size) == said
    assert sizes.allows(size) == (not said)


@given(
    st.builds(
        Sizes,
        min=st.integers(1, 9),
        max=st.none() | st.integers(1, 12),
        sizes=st.just(()) | st.lists(st.integers(1, 12), max_size=4).map(tuple),
        step=st.integers(1, 4),
    ),
    st.integers(0, 14),
)
def test_the_nearest_sizes_are_the_nearest_allowed(sizes, size):
    allowed = [one for one in range(1, 30) if sizes.allows(one)]
    below, above = [one for one in allowed if one < size][-1:], [one for one in allowed if one > size][:1]
    assert sizes.nearest(size) == (*below, *above)
    assert (not allowed) <= bool(sizes.contradictions())


def test_settings_that_contradict_each_other_are_told():
    assert EVEN.contradictions() == LISTED.contradictions() == ()
    assert Sizes(min=5, max=4).contradictions() == (
        "no size is allowed by all of world.min = 5, world.max = 4, world.step = 1",
    )
    assert Sizes(sizes=(2, 9, 12), max=8).contradictions() == (
        "world.sizes has 9, which world.max = 8 forbids",
        "world.sizes has 12, which world.max = 8 forbids",
    )


def test_a_size_that_the_run_may_not_have_is_refused_with_sizes_that_may_be_and_have_a_layout():
    given_numbers = {"num_microbatches": 4, "sizes": Sizes(min=2, sizes=(1, 2, 3, 5, 7, 8))}
    with pytest.raises(LayoutError) as refusal:
        resized(parse_layout("fsdp4"), PRESETS["tiny"].limits(), world_size=6, **given_numbers)
    assert str(refusal.value).splitlines() == [
        "no layout of 6 ranks is legal here; nearest sizes that have one: 3 and 8",
        "  - 6 ranks are not allowed: world.sizes = [1, 2, 3, 5, 7, 8]; nearest: 5 or 7",
        "  - fsdp6: 4 micro-batches over 6 data ranks leave 0 for some; each needs at least one: 6 in all",
        "nearest legal: fsdp3, fsdp4.tp2",
    ]
