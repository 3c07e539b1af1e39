"""Copies between a shelf and pieces of memory: what saving and loading come down to."""

import time

import torch
import torch.distributed as dist

from dynatrain.execute.hf_export import Export
from dynatrain.execute.hf_folder import open_folder
from dynatrain.layout.text import print_layout
from dynatrain.space.blocks import COUNTERS
from dynatrain.space.box import intersect, whole, within
from dynatrain.space.decoder import catalogue


def common(shelf, name, box):
    """Of each stored box that meets ``box``: its view of the common part, and the slices of that part in ``box``."""
    for stored in shelf.get((name, "param")) or shelf[name, "buffer"]:
        both = intersect(stored.box, box)
        if both is not None:
            yield stored.tensor[within(both, stored.box)], within(both, box)


def read(shelf, shape, dtype=torch.float32):
    """Every parameter and buffer, whole."""
    weights = {}
    for tensor in catalogue(shape):
        value = weights[tensor.name] = torch.full(tensor.shape, torch.nan, dtype=dtype)
        if tensor.states[0].dtype == "int64":
            value = weights[tensor.name] = torch.full(tensor.shape, -1)
        for stored, at in common(shelf, tensor.name, whole(tensor.shape)):
            value[at].copy_(stored)
    return weights


def export(path, shape, weights, tokenizer=None, **options):
    """All of ``weights`` into a new folder, by one rank."""
    made = Export.create(path, shape, **options)
    shelf = made.open()
    for name, value in weights.items():
        if name.endswith(COUNTERS):
            continue
        for stored, at in common(shelf, name, whole(tuple(value.shape))):
            stored.copy_(value[at])
    made.finish(tokenizer)
    return path


def load(path, shape, dtype=torch.float32):
    """All parameters of a folder."""
    return read(open_folder(path, shape), shape, dtype)


def into_pieces(shelf, world, rank):
    """Fill this rank's parameters from the shelf."""
    for value, name, box in _parameters(world, rank):
        for stored, at in common(shelf, name, box):
            value[at].copy_(stored)


def into_shelf(shelf, world, rank):
    """Write this rank's parameters where it is the first of those that hold them."""
    for value, name, box in _parameters(world, rank, only_first=True):
        for stored, at in common(shelf, name, box):
            stored.copy_(value[at])


def misplaced(world, rank, right):
    """Every parameter of which this rank holds other bits than its box of ``right`` has; all are in fp32."""
    return [
        name
        for value, name, box in _parameters(world, rank)
        if not torch.equal(bits(value), bits(right[name][within(box, whole(tuple(right[name].shape)))]))
    ]


def bits(value):
    return value.contiguous().view(torch.int32)


def visits(sw, books, layouts):
    """Go through the layouts without training; yields in each, once the switch to it is committed.

    Args:
        sw: a ``Switcher`` in the first of them.
        books: its recorder.
        layouts: as texts.
    """
    yield layouts[0]
    steps = sw.steps(until=1 << 30)
    for number, text in enumerate(layouts[1:], 1):
        sw.request(text, mode=("keep", "tight")[number % 2])
        for _ in steps:
            dist.barrier()  # every training step couples all ranks
            if len(books.switches) == number:
                break
            time.sleep(0.002)
        assert books.switches[-1][::3] == ("committed", True), books.switches[-1]
        yield print_layout(sw.layout)


def _parameters(world, rank, *, only_first=False):
    tensors = {tensor.name: tensor for tensor in world.catalogue}
    for (name, state), value in world.values().items():
        tensor = tensors[name]
        if state == "param" and not (only_first and world.ownership.copy_index(tensor, rank)):
            yield value, name, world.ownership.box(tensor, rank)


def random_weights(shape, dtype=torch.float32, seed=0):
    """Numbers that tell every tensor apart, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: (torch.randn(tensor.shape, generator=generator) * 0.1).to(dtype)
        if tensor.states[0].dtype != "int64"
        else torch.zeros(tensor.shape).long()
        for tensor in catalogue(shape)
    }
