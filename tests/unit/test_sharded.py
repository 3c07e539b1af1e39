"""Plain parameters that are one tp rank's part, as they are read: their boxes, and what is refused."""

import pytest
import torch
from torch import nn

from dynatrain.layout.text import parse_layout
from dynatrain.models.names import strip_wrappers
from dynatrain.space.box import within
from dynatrain.space.tensor import State
from dynatrain.train.live import UnplacedTensorError, describe, entries, find_slots, merge
from dynatrain.train.segments import SegmentError, Segments

WHOLE = {"rows": torch.arange(24.0).view(8, 3), "columns": torch.arange(40.0).view(5, 8), "norm": torch.arange(3.0)}
DIMS = {"rows": 0, "columns": 1}


def part(name, ways, index):
    return WHOLE[name].chunk(ways, DIMS[name])[index] if name in DIMS else WHOLE[name]


def read(text, make, sharded):
    """The job as all ranks of a layout tell of it, and their tensors."""
    layout = parse_layout(text)
    told, held = [], []
    for rank in range(layout.world_size):
        net = nn.Module()
        for name, value in make(layout.size("tp"), layout.coordinates(rank).tp).items():
            net.register_parameter(name, nn.Parameter(value.clone()))
        found = entries([net], strip_wrappers)
        find_slots(found, Segments(sharded=sharded), layout, rank)
        told.append(describe(found, {name: (State("param", "float32"),) for name in found}, layout, rank))
        held.append(found)
    return *merge(told, layout), held


@pytest.mark.parametrize("text", ["tp2", "dp2.tp4", "tp2.dp2", "dp2"])
def test_a_part_lies_at_its_place_in_the_whole(text):
    catalogue, ownership, held = read(text, lambda ways, index: {name: part(name, ways, index) for name in WHOLE}, DIMS)
    assert {tensor.name: tensor.shape for tensor in catalogue} == {n: tuple(v.shape) for n, v in WHOLE.items()}
    for rank, found in enumerate(held):
        for tensor in catalogue:
            place = within(ownership.box(tensor, rank), tuple((0, size) for size in tensor.shape))
            assert torch.equal(found[tensor.name].value, WHOLE[tensor.name][place])


def test_parts_that_are_not_equal_are_refused_by_name_and_ranks():
    with pytest.raises(UnplacedTensorError, match=r"odd: rank 0 has \(2, 2\) cut .*, rank 1 has \(18, 2\)"):
        read("tp2", lambda _ways, index: {"odd": torch.zeros((1, 9)[index], 2)}, {"odd": 0})


def test_a_declaration_that_fits_nothing_is_refused():
    with pytest.raises(SegmentError, match=r"rows has shape \(4, 3\) and no dim 2"):
        read("tp2", lambda ways, index: {"rows": part("rows", ways, index)}, {"rows": 2})
    assert Segments(sharded={"net.rows": 0, "rows": 0}).unused(["rows"]) == {"net.rows"}


def test_a_tensor_under_two_declarations_is_refused():
    with pytest.raises(SegmentError, match=r"mlp.rows falls under mlp and rows; declare it once"):
        Segments(sharded={"mlp": 0, "rows": 1}).cut("mlp.rows")
