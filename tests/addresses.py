"""Address stamps: every element of every state is a number that says where it belongs, by arithmetic of its own.

What a rank must hold follows here from the layout's text and the rules of the design alone: tensor parallelism cuts
first (rows; columns of ``down``; norms not at all), fsdp cuts the rows that are left, each in
ceil-sized chunks; layers are dealt evenly over the stages. Nothing of the project's own arithmetic is asked.
"""

import math
import re

import torch

STATES = ("param", "exp_avg", "exp_avg_sq", "step", "ema.shadow", "mean.local", "buffer")
"""All kinds of state of the job: the value, the optimizer's, two registered objects', and a buffer's only one."""


def states_of(name):
    """The states that a tensor has."""
    return STATES[-1:] if name.endswith(".seen") else STATES[:-1]


def place(text, rank):
    """``({axis: ways}, {axis: index})`` of a rank in a layout's text."""
    *parts, order = [*re.findall(r"(?:^|\.)(pp|dp|fsdp|tp)(\d+)", text), re.search(r"order_([\d_]+)", text)]
    spot = list(map(int, order[1].split("_"))).index(rank) if order else rank
    ways, index = dict.fromkeys(("pp", "dp", "fsdp", "tp"), 1), dict.fromkeys(("pp", "dp", "fsdp", "tp"), 0)
    for axis, size in reversed(parts):
        ways[axis] = int(size)
        spot, index[axis] = divmod(spot, int(size))
    return ways, index


def chunk(ends, ways, index):
    size = -(-(ends[1] - ends[0]) // ways)
    first = min(ends[0] + index * size, ends[1])
    return first, min(first + size, ends[1])


def address(text, rank, name, shape, layers):
    """The ``(first, end)`` of each dim that ``rank`` must hold of a tensor; None where it must hold nothing."""
    ways, index = place(text, rank)
    layer = re.match(r"layers\.(\d+)\.", name)
    stage = int(layer[1]) * ways["pp"] // layers if layer else 0 if name.startswith("embed") else ways["pp"] - 1
    if stage != index["pp"]:
        return None
    box = [(0, size) for size in shape]
    if name.endswith(".seen"):  # buffers are never cut
        return tuple(box)
    if "norm" not in name:
        dim = 1 if name.endswith("down.weight") else 0
        box[dim] = chunk(box[dim], ways["tp"], index["tp"])
    box[0] = chunk(box[0], ways["fsdp"], index["fsdp"])
    return tuple(box)


def stamp(number, state, shape, box):
    """The stamps of ``box`` of a state of tensor ``number``: exact in fp32; a scalar state has one for its tensor."""
    base = (number * len(STATES) + STATES.index(state)) << 13
    if state == "step":
        return torch.tensor(float(base))
    whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    assert whole.numel() < 1 << 13
    return base + whole[tuple(slice(*ends) for ends in box)]


def fill(values, tensors, text, rank, layers):
    """Write its stamp into every element that a rank holds.

    Args:
        values: ``{(tensor, state): local tensor}``.
        tensors: ``{name: shape}`` of all tensors, in one order on all ranks.
        text: of the layout.
        rank: this rank.
        layers: of the model.
    """
    for number, (name, shape) in enumerate(tensors.items()):
        box = address(text, rank, name, shape, layers)
        for state in states_of(name) if box is not None else ():
            values[name, state].copy_(stamp(number, state, shape, box))


def misplaced(values, tensors, text, rank, layers):
    """``(tensor, state, index of the first wrong element)`` of all that is missing, in excess, or not as stamped."""
    wrong = []
    left = dict(values)
    for number, (name, shape) in enumerate(tensors.items()):
        box = address(text, rank, name, shape, layers)
        for state in states_of(name) if box is not None else ():
            value, want = left.pop((name, state), None), stamp(number, state, shape, box)
            if value is None or value.shape != want.shape:
                wrong.append((name, state, "missing"))
            elif (bad := value != want).any():  # NaN, the poison, differs from every stamp
                first = [index + ends[0] for index, ends in zip(bad.nonzero()[0].tolist(), box, strict=False)]
                wrong.append((name, state, tuple(first)))
    return wrong + [(name, state, "in excess") for name, state in left]


def arriving(old, new, tensors, rank, layers):
    """Bytes that ``rank`` must get from others when ``old`` becomes ``new``: of fp64, but of fp32 for a scalar."""
    nbytes = 0
    for name, shape in tensors.items():
        was, box = (address(text, rank, name, shape, layers) for text in (old, new))
        if box is not None:
            kept = (
                0
                if was is None
                else math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(was, box, strict=True))
            )
            scalar = "step" in states_of(name)
            nbytes += 8 * (len(states_of(name)) - scalar) * (math.prod(b - a for a, b in box) - kept)
            nbytes += 4 * (scalar and was is None)
    return nbytes


def held(text, tensors, rank, layers):
    """Bytes that ``rank`` must hold, counted likewise."""
    nbytes = 0
    for name, shape in tensors.items():
        box = address(text, rank, name, shape, layers)
        if box is not None:
            scalar = "step" in states_of(name)
            nbytes += 8 * (len(states_of(name)) - scalar) * math.prod(b - a for a, b in box) + 4 * scalar
    return nbytes
