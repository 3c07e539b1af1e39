import dataclasses
import random
from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests import toys

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import AXES, Layout
from dynatrain.layout.legality import ModelLimits, nearest, problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.stages import stage_ranges
from dynatrain.layout.text import parse_layout, print_layout


@st.composite
def layouts(draw, largest=4, most=4):
    """Well-formed layouts in their one value per meaning: any axis order, options where their axis is."""
    names = draw(st.permutations(AXES).map(lambda p: p[: draw(st.integers(0, most))]))
    axes = tuple((name, draw(st.integers(2, largest))) for name in names)
    plain = Layout(axes=axes)
    order = tuple(draw(st.permutations(range(plain.world_size)))) if draw(st.booleans()) else ()
    chunks = draw(st.sampled_from([1, 1, 2, 3])) if "pp" in names else 1
    schedule = draw(st.sampled_from(["", "", "zb", "zbv"] if chunks == 2 else ["", "", "zb"])) if "pp" in names else ""
    count = plain.size("pp") * chunks
    stages = st.lists(st.integers(1, 5), min_size=count, max_size=count).map(tuple)
    ep = draw(st.sampled_from(divisors(plain.inner_ranks)))
    return Layout(
        axes=axes,
        chunks=chunks,
        stages=draw(stages) if "pp" in names and draw(st.booleans()) else (),
        schedule=schedule,
        zero=draw(st.sampled_from([1, 2, 3])) if {"fsdp", "cp"} & set(names) else 3,
        cp_method=draw(st.sampled_from(["gather", "ring", "ulysses"])) if "cp" in names else "gather",
        sp=draw(st.booleans()) if "tp" in names else False,
        ep=ep,
        etp=draw(st.sampled_from(divisors(plain.inner_ranks // ep))),
        order=() if order == tuple(range(plain.world_size)) else order,
    )


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def models(draw):
    sizes = st.sampled_from(
        [12, 24, 24, 5, 18]
    )  # what many ways divide, so that each rule is now and then the only one
    kv = draw(st.sampled_from([1, 2, 2, 3, 4]))
    experts = draw(st.sampled_from([0, 0, 2, 4, 6]))
    return ModelLimits(
        num_layers=draw(st.integers(1, 8)),
        num_heads=kv * draw(st.sampled_from([1, 2, 4, 6])),
        num_kv_heads=kv,
        hidden_size=draw(sizes),
        intermediate_size=draw(sizes),
        vocab_size=draw(st.integers(1, 24)),
        num_experts=experts,
        moe_intermediate_size=draw(st.integers(1, 12)) if experts else 0,
    )


numbers = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 24),
        "num_microbatches": st.sampled_from([1, 5, 7, 16, 24]),
        "sequence": st.sampled_from([7, 12, 24, 24, 48]),
    }
)


def built(layout, limits, world_size, num_microbatches, sequence):
    """Whether everything can really be dealt out: the rules of legality, said by doing."""
    mesh = [()]
    for _, size in layout.axes:
        mesh = [(*at, i) for at in mesh for i in range(size)]
    deal = lambda things, ways: [things[i::ways] for i in range(ways)]  # noqa: E731
    even = lambda size, ways: len({len(hand) for hand in deal(range(size), ways)}) == 1  # noqa: E731
    tp, pp, cp = layout.size("tp"), layout.size("pp"), layout.size("cp")
    cut = [limits.num_heads, limits.hidden_size, limits.intermediate_size]
    layers = list(range(limits.num_layers))
    split = layout.stages or [len(hand) for hand in deal(layers, pp * layout.chunks)]
    stages = [[layers.pop(0) for _ in range(n) if layers] for n in split]
    filled = all(stages) and [len(s) for s in stages] == list(split) and not layers
    shares = deal(range(num_microbatches), layout.size("dp") * layout.size("fsdp"))
    heads = deal(range(limits.num_heads), tp)[0]
    copies = [head for head in range(limits.num_kv_heads) for _ in range(tp // limits.num_kv_heads)]
    frees = layout.schedule != "" and layout.zero == 3 and layout.size("fsdp") * cp > 1
    rounds = (
        max(1, len(shares[0]) // pp) if layout.schedule == "zb" or (layout.chunks > 1 and not layout.schedule) else 1
    )
    dense = layout.ep == layout.etp == 1
    moe = (
        limits.num_experts > 0
        and even(limits.num_experts, layout.ep)
        and even(limits.moe_intermediate_size, layout.etp)
    )
    return (
        len(mesh) == world_size
        and all(even(size, tp) for size in cut)
        and (even(limits.num_kv_heads, tp) or len(copies) == tp)
        and (cp == 1 or even(sequence, 2 * cp))
        and (not (layout.sp or limits.num_experts) or even(sequence // cp, tp))
        and (layout.cp_method != "ulysses" or even(len(heads), cp))
        and (dense or moe)
        and not frees
        and filled
        and all(len(share) >= pp for share in shares)
        and even(len(shares[0]), rounds)
    )


@given(layouts())
def test_every_layout_prints_as_a_text_that_reads_back(layout):
    assert form_problems(layout) == ()

    assert parse_layout(print_layout(layout)) == layout


@given(st.text(alphabet="dpfstzv_.-0123cordegbinDP ", max_size=16))
def test_any_text_is_read_canonically_or_refused_and_what_is_offered_instead_is_legal(text):
    try:
        layout = parse_layout(text)
    except LayoutError as error:
        for offered in error.nearest:
            assert print_layout(parse_layout(offered)) == offered
    else:
        assert print_layout(layout) == text or ".order_" in text


@given(layouts(), models(), numbers)
def test_a_layout_has_no_problem_exactly_where_all_can_be_dealt_out(layout, limits, given_numbers):
    legal = not problems(layout, limits, **given_numbers)

    assert legal == built(layout, limits, **given_numbers)


@settings(max_examples=400)
@given(layouts(largest=4, most=3), models(), numbers)
def test_a_layout_of_the_right_world_has_no_problem_exactly_where_all_can_be_dealt_out(layout, limits, given_numbers):
    """As above, where the world fits: by chance it seldom does."""
    fitting = given_numbers | {"world_size": layout.world_size}

    assert (not problems(layout, limits, **fitting)) == built(layout, limits, **fitting)


def test_one_number_changed_makes_a_legal_layout_illegal_exactly_where_not_all_can_be_dealt_out():
    """By chance few layouts break one rule alone: here each begins as a legal one."""
    pick, verdicts = random.Random(1).choice, Counter()
    for _ in range(1500):
        of = toys.toy(pick)
        layout = toys.layout(pick, of, pick((2, 4, 6, 8, 12)))
        tp = layout.size("tp")
        field = pick(("num_kv_heads", "num_heads", "hidden_size", "num_experts", "moe_intermediate_size", ""))
        number = pick((1, 2, 3, 4, 6, 8, 12))
        limits = dataclasses.replace(of.limits, **({field: number} if field else {}))
        given_numbers = {
            "world_size": layout.world_size,
            "num_microbatches": layout.data_ranks * layout.size("pp") - pick((0, 0, 1)),
            "sequence": layout.size("cp") * pick((2 * tp, 2 * tp, 6, 2, 3 * tp)),
        }
        legal = not problems(layout, limits, **given_numbers)
        assert legal == built(layout, limits, **given_numbers), (layout, limits, given_numbers)
        verdicts[legal] += 1
    assert min(verdicts.values()) > 300


@given(layouts(most=3), models(), numbers)
def test_nearest_layouts_are_legal_distinct_and_at_most_three(layout, limits, given_numbers):
    near = nearest(layout, limits, **given_numbers)

    assert all(built(candidate, limits, **given_numbers) for candidate in near)
    assert len(set(near)) == len(near) <= 3


@given(layouts(largest=3, most=3), models(), numbers)
def test_nearest_of_a_legal_layout_begins_with_it(layout, limits, given_numbers):
    fitting = given_numbers | {"world_size": layout.world_size}
    assume(built(layout, limits, **fitting))

    assert nearest(layout, limits, **fitting)[0] == layout


@given(layouts(largest=3), models())
def test_resolving_names_the_same_stages_and_is_done_once(layout, limits):
    assume(layout.num_stages <= limits.num_layers and (not layout.stages or sum(layout.stages) == limits.num_layers))

    resolved = resolve(layout, limits.num_layers)

    assert stage_ranges(resolved, limits.num_layers) == stage_ranges(layout, limits.num_layers)
    assert resolve(resolved, limits.num_layers) == resolved
    assert dataclasses.replace(resolved, stages=layout.stages) == layout
    assert bool(resolved.stages) == (len(set(map(len, stage_ranges(layout, limits.num_layers)))) > 1)
