"""Random toy decoders and random legal layouts for them, over all axes and options: what long walks draw from.

Every choice is made by ``pick(options)``: ``random.Random(seed).choice`` for tests of real ranks, or hypothesis' draw
(:func:`picked`). The catalogues have the form of a real decoder's, with sizes that need not divide by anything.
"""

import itertools
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from dynatrain.layout.layout import AXES, Layout
from dynatrain.layout.legality import ModelLimits, problems
from dynatrain.space.optimizers import OPTIMIZERS, beside, is_hidden_matrix
from dynatrain.space.tensor import FIRST, LAST, Catalogue, State, Tensor

WORLDS = (*range(1, 17), 4, 8, 8, 12, 16, 16)
PARAM = (State("param", "float32"),)
ROWS = (("tp", 0), ("fsdp", 0))
COLUMNS = (("tp", 1), ("fsdp", 0))
SHARDED = (("fsdp", 0),)
OUT = (("ep", 0), ("etp", 1), ("efsdp", 0))
IN = (("ep", 0), ("etp", 2), ("efsdp", 0))


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Sizes of a toy decoder, and what trains it.

    ``experts`` is 0 for a dense one, ``dense`` its first layers without experts. ``optimizer`` has the hidden matrices,
    ``rest`` all others; ``block`` is how many elements share a scale, so few that rows have several.
    """

    layers: int
    heads: int
    kv_heads: int
    head: int
    width: int
    inner: int
    vocabulary: int
    tied: bool
    experts: int
    expert_inner: int
    dense: int
    optimizer: str
    rest: str
    block: int

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            hidden_size=self.width,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            num_experts=self.experts,
            moe_intermediate_size=self.expert_inner if self.experts else 0,
        )


def picked(draw):
    """``pick`` for hypothesis."""
    return lambda options: draw(st.sampled_from(list(options)))


def toy(pick, ways=None) -> Toy:
    """A random one; with ``ways`` 5 or 7 its sizes are of that kind, so that such worlds can cut it."""
    ways = ways or pick((*(1,) * 10, 5, 7))
    heads = ways * pick((1, 2, 2)) if ways > 1 else pick((2, 4, 6, 8, 12, 12))
    optimizer = pick(tuple(OPTIMIZERS))
    return Toy(
        layers=pick((1, 2, 4, 4, 5, 6, 7, 8)),
        heads=heads,
        kv_heads=pick([n for n in (1, 2, 3, 4, 5, 7, 8) if heads % n == 0]),
        head=pick((1, 2, 3)),
        width=ways * pick((2, 3, 4)) if ways > 1 else pick((7, 12, 12, 16, 20, 24, 24, 24)),
        inner=ways * pick((1, 2, 2)) if ways > 1 else pick((5, 12, 12, 16, 18, 24, 24, 24)),
        vocabulary=pick((5, 11, 13, 17, 24)),
        tied=pick((False, True)),
        experts=pick((0, ways, 2 * ways, 2 * ways)) if ways > 1 else pick((0, 2, 3, 4, 6, 8, 8)),
        expert_inner=ways * pick((1, 2, 2)) if ways > 1 else pick((2, 3, 4, 6, 8, 12)),
        dense=pick((0, 0, 1)),
        optimizer=optimizer,
        rest=pick((optimizer, optimizer, *OPTIMIZERS)),
        block=pick((3, 5, 7)),
    )


def catalogue(of: Toy) -> Catalogue:
    """All tensors, with global layer and expert numbers, and what the optimizers keep beside them."""
    anchors = (FIRST, LAST) if of.tied else (FIRST,)
    tensors = [Tensor("embed_tokens.weight", (of.vocabulary, of.width), ROWS, anchors, PARAM, "embedding")]
    for layer in range(of.layers):
        unit = f"layers.{layer}"
        tensors += [
            Tensor(f"{unit}.{name}", shape, cuts, (layer,), PARAM, unit) for name, shape, cuts in _block(of, layer)
        ]
        if of.experts and layer >= of.dense:
            tensors.append(Tensor(f"{unit}.bias", (of.experts,), (), (layer,), (State("buffer", "float32"),), unit))
    tensors.append(Tensor("norm.weight", (of.width,), SHARDED, (LAST,), PARAM, "head"))
    if not of.tied:
        tensors.append(Tensor("lm_head.weight", (of.vocabulary, of.width), ROWS, (LAST,), PARAM, "head"))
    return beside(tuple(tensors), lambda *given: _kept(of, *given))


def _kept(of: Toy, name: str, shape: tuple[int, ...], dtype: str) -> tuple[State, ...]:
    """What the product's schemas say, in blocks of a toy's size."""
    whose = of.optimizer if is_hidden_matrix(name, shape) else of.rest
    found = OPTIMIZERS[whose](name, shape, dtype)
    return tuple(replace(state, block=of.block) if state.block else state for state in found)


def _block(of: Toy, layer: int):
    queries, keys, width = of.heads * of.head, of.kv_heads * of.head, of.width
    grouped = ((f"tp{of.kv_heads}", 0), ("fsdp", 0))
    yield "q", (queries, width), ROWS
    yield "k", (keys, width), grouped
    yield "v", (keys, width), grouped
    yield "o", (width, queries), COLUMNS
    yield "norm", (width,), SHARDED
    if of.experts and layer >= of.dense:
        yield "router", (of.experts, width), SHARDED
        yield "experts.up", (of.experts, of.expert_inner, width), OUT
        yield "experts.down", (of.experts, width, of.expert_inner), IN
    else:
        yield "up", (of.inner, width), ROWS
        yield "down", (width, of.inner), COLUMNS


def layout(pick, of: Toy, world: int) -> Layout:
    """A legal layout of ``world`` ranks, in any rank order, with any options."""
    sizes = dict.fromkeys(AXES, 1)
    names = shuffled(pick, AXES)
    room = world
    for axis in (pick(("tp", "tp", "tp", "pp")), *shuffled(pick, AXES)):
        if sizes[axis] > 1:
            continue
        fitting = [size for size in _divisors(room) if not problems(_plain(sizes | {axis: size}, names), of.limits)]
        sizes[axis] = pick(_mostly_over_1(fitting) if room == world else fitting)
        room //= sizes[axis]
    sizes[pick(("dp", "fsdp"))] *= room
    pinned = shuffled(pick, range(world)) if pick((True, False, False)) else ()
    options = _pipeline(pick, of, sizes) | _context(pick, sizes) | _experts(pick, of, sizes)
    zeros = [2, 1] if options["schedule"] else [3, 2, 1]
    found = Layout(
        axes=_plain(sizes, names).axes,
        zero=pick(zeros) if sizes["fsdp"] * sizes["cp"] > 1 else 3,
        sp=sizes["tp"] > 1 and pick((False, True)),
        order=pinned if pinned != tuple(range(world)) else (),
        **options,
    )
    if problems(found, of.limits):  # heads too few for Ulysses: all others are legal by construction
        found = _without_ulysses(found)
    assert not problems(found, of.limits), (found, of, problems(found, of.limits))
    return found


def pair(pick, of: Toy) -> tuple[Layout, Layout]:
    """Two layouts, half of the time of the same number of ranks."""
    world = pick(WORLDS)
    other = pick((world, world, pick(WORLDS)))
    return layout(pick, of, world), layout(pick, of, other)


def shuffled(pick, things):
    left, found = list(things), []
    while left:
        found.append(pick(left))
        left.remove(found[-1])
    return tuple(found)


def _plain(sizes, names) -> Layout:
    return Layout(axes=tuple((axis, sizes[axis]) for axis in names if sizes[axis] > 1))


def _without_ulysses(of: Layout) -> Layout:
    return Layout(**{name: getattr(of, name) for name in Layout.__slots__} | {"cp_method": "gather"})


def _pipeline(pick, of: Toy, sizes):
    pp = sizes["pp"]
    if pp == 1:
        return {"chunks": 1, "schedule": "", "stages": ()}
    chunks = pick([n for n in (1, 2, 2, 3) if pp * n <= of.layers] or [1])
    schedule = pick(("", "zb", "zbv", "zbv") if chunks == 2 else ("", "zb"))
    stages = ()
    if pick((False, True)):
        edges = sorted(shuffled(pick, range(1, of.layers))[: pp * chunks - 1])
        stages = tuple(b - a for a, b in itertools.pairwise([0, *edges, of.layers]))
    return {"chunks": chunks, "schedule": schedule, "stages": stages}


def _context(pick, sizes):
    return {"cp_method": pick(("gather", "ring", "ulysses")) if sizes["cp"] > 1 else "gather"}


def _experts(pick, of: Toy, sizes):
    if not of.experts:
        return {"ep": 1, "etp": 1}
    inner = sizes["fsdp"] * sizes["cp"] * sizes["tp"]
    ep = pick(_mostly_over_1(size for size in _divisors(inner) if of.experts % size == 0))
    etp = pick(_mostly_over_1(size for size in _divisors(inner // ep) if of.expert_inner % size == 0))
    return {"ep": ep, "etp": etp}


def _mostly_over_1(sizes):
    first, *more = sizes
    return [first, *more, *more, *more]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
