"""Small catalogues and random layouts for tests of plans."""

import itertools
import math

from hypothesis import strategies as st

from dynatrain.layout.layout import AXES, Layout
from dynatrain.space.tensor import FIRST, LAST, Catalogue, State, Tensor

STATES = (
    State("param", "float32"),
    State("exp_avg", "float32"),
    State("exp_avg_sq", "float64"),
    State("step", "float32", scalar=True),
)
ANY_FORM = (
    *STATES,
    State("codes", "uint8"),
    State("scale", "float32", block=3),
    State("column", "float64", reduced=(0,)),
    State("row", "float32", reduced=(1,)),
    State("other_row", "float32", reduced=(1,)),
)
"""States of every form, for matrices."""
ROWS = (("tp", 0), ("fsdp", 0))
COLUMNS = (("tp", 1), ("fsdp", 0))
COPIED = (("fsdp", 0),)
OUT = (("ep", 0), ("etp", 1), ("efsdp", 0))
IN = (("ep", 0), ("etp", 2), ("efsdp", 0))
LAYERS = 4


def small(
    *,
    width: int = 6,
    inner: int = 10,
    vocabulary: int = 11,
    tied: bool = False,
    layers: int = LAYERS,
    experts: int = 0,
    states=STATES,
) -> Catalogue:
    """A catalogue in the form of a decoder's, with sizes that need not divide by anything; matrices have ``states``."""
    anchors = (FIRST, LAST) if tied else (FIRST,)
    tensors = [Tensor("embed", (vocabulary, width), ROWS, anchors, states, "embedding")]
    for layer in range(layers):
        unit = f"layers.{layer}"
        tensors += [
            Tensor(f"{unit}.up", (inner, width), ROWS, (layer,), states, unit),
            Tensor(f"{unit}.down", (width, inner), COLUMNS, (layer,), states, unit),
            Tensor(f"{unit}.norm", (width,), COPIED, (layer,), STATES, unit),
        ]
        if experts:
            tensors += [
                Tensor(f"{unit}.experts.up", (experts, inner, width), OUT, (layer,), STATES, unit),
                Tensor(f"{unit}.experts.down", (experts, width, inner), IN, (layer,), STATES, unit),
            ]
    tensors.append(Tensor("norm", (width,), COPIED, (LAST,), STATES[:2], "head"))
    if not tied:
        tensors.append(Tensor("head", (vocabulary, width), ROWS, (LAST,), states, "head"))
    return tuple(tensors)


def layout(
    order: tuple[int, ...] = (), stages: tuple[int, ...] = (), chunks: int = 1, ep: int = 1, etp: int = 1, **sizes: int
) -> Layout:
    """A layout from sizes, outermost first."""
    axes = tuple((axis, size) for axis, size in sizes.items() if size > 1)
    return Layout(axes=axes, order=order, stages=stages, chunks=chunks, ep=ep, etp=etp)


@st.composite
def catalogues(draw: st.DrawFn) -> Catalogue:
    size = st.sampled_from([*range(1, 14), 17])
    sizes = {name: draw(size) for name in ("width", "inner", "vocabulary")}
    experts, states = draw(st.sampled_from((0, 1, 3, 4))), draw(st.sampled_from([STATES, ANY_FORM]))
    return small(**sizes, tied=draw(st.booleans()), experts=experts, states=states)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any axes in any rank order, worlds of 1 to 8, sometimes uneven stages, sometimes permuted ranks.

    Nothing need divide anything but the ranks: more than a model allows.
    """
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(AXES)):
        room = 8 // math.prod(sizes.values())
        sizes[axis] = draw(st.integers(1, min(room, LAYERS) if axis == "pp" else room))
    stages: tuple[int, ...] = ()
    chunks = 2 if sizes["pp"] == 2 and draw(st.booleans()) else 1
    if sizes["pp"] > 1 and draw(st.booleans()):
        cuts = sizes["pp"] * chunks - 1
        edges = [0, *sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=cuts, max_size=cuts))), LAYERS]
        stages = tuple(b - a for a, b in itertools.pairwise(edges))
    world = math.prod(sizes.values())
    ranks = sizes["fsdp"] * sizes["cp"] * sizes["tp"]
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, ranks // ep + 1) if ranks // ep % n == 0]))
    order = tuple(draw(st.permutations(range(world)))) if draw(st.booleans()) else ()
    return layout(order, stages, chunks, ep, etp, **sizes)


@st.composite
def numbered(draw: st.DrawFn) -> Layout:
    """A layout as it is, or with its ranks numbered as some of the holders of a crossing, gaps and all."""
    plain = draw(layouts())
    members = draw(st.permutations(range(10)))[: plain.world_size]
    return plain.over(members) if draw(st.booleans()) else plain
