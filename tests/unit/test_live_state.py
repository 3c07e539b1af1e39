"""What is read from live objects, without ranks: reports, buffers that were replaced, values that lie elsewhere."""

import copy

import pytest
import torch
from torch import nn

from dynatrain.layout.text import parse_layout
from dynatrain.models.names import strip_wrappers
from dynatrain.space.tensor import State
from dynatrain.train.install import read_reports, report
from dynatrain.train.live import Described, UnplacedTensorError, entries, merge, renew_buffers
from dynatrain.train.loading import holds
from dynatrain.train.optimizers.state import blank
from dynatrain.train.states import create_optimizer_state
from dynatrain.train.world import World


def described(*names, stage=0):
    return [Described(name, (4,), (), (State("param", "float32"),), stage) for name in names]


def test_a_tensor_that_part_of_a_stage_lacks_is_refused_and_one_of_another_stage_is_none_of_it():
    layout = parse_layout("pp2.dp2")
    whole = [described("a"), described("a"), described("b", stage=1), described("b", stage=1)]
    assert [tensor.name for tensor in merge(whole, layout)[0]] == ["a", "b"]

    whole[3] = []
    with pytest.raises(UnplacedTensorError, match=r"b: of one stage ranks \[2\] hold it and ranks \[3\] do not"):
        merge(whole, layout)


def test_a_buffer_that_took_the_place_of_another_like_it_is_looked_up_anew():
    part = nn.BatchNorm1d(3)
    found = entries([part], strip_wrappers)
    part.num_batches_tracked = part.num_batches_tracked + 1
    part.running_mean = torch.zeros(5)
    before = found["running_mean"].value

    renew_buffers([part], found)
    assert found["num_batches_tracked"].value is part.num_batches_tracked
    assert found["running_mean"].value is before, "another shape: check_tensors refuses it"


def test_values_that_lie_elsewhere_than_pieces_are_given_back():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    create_optimizer_state(optimizer)
    layout = parse_layout("dp1")
    world = World(layout, None, [model], optimizer, entries([model], strip_wrappers))
    world.catalogue, world.ownership = read_reports([report(world, world.states(), 0)], layout)
    pieces = world.pieces(0, torch.device("cpu"))
    elsewhere = copy.deepcopy(pieces)  # as the step counters of a CUDA world, which lie on the host
    for piece in elsewhere.values():
        piece.tensor.fill_(7)

    world.write_back(elsewhere)
    assert {value.unique().item() for value in world.values().values()} == {7.0}
    kept = {key: value.clone() for key, value in world.values().items()}
    world.write_back(pieces)
    assert all(torch.equal(value, kept[key]) for key, value in world.values().items())


@pytest.mark.parametrize(
    ("group", "device"),
    [({}, "cpu"), ({"fused": None}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_a_step_counter_lies_where_the_group_s_kernels_count(group, device):
    param = torch.empty(3, device="meta")
    assert blank(param, State("step", "float32", scalar=True), group).device.type == device


def test_the_first_counters_of_a_capturable_optimizer_lie_on_the_device():
    param = nn.Parameter(torch.empty(3, device="meta"))
    for capturable, device in ((True, "meta"), (False, "cpu")):
        optimizer = torch.optim.AdamW([param], capturable=capturable)
        create_optimizer_state(optimizer)
        assert optimizer.state[param]["step"].device.type == device


@pytest.mark.parametrize(
    ("here", "there", "all_of_it"),
    [
        ("float64", "float32", True),
        ("float32", "float64", False),
        ("float32", "bfloat16", True),
        ("float32", "float16", True),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float32", False),
        ("int64", "uint8", True),
        ("uint8", "int64", False),
        ("int8", "uint8", False),
        ("int64", "bool", True),
        ("bool", "int64", False),
        ("float32", "int64", False),
        ("int64", "float32", False),
        ("complex64", "float32", False),
        ("complex128", "complex64", True),
        ("bool", "bool", True),
        ("float8_e4m3fn", "float8_e4m3fn", True),
    ],
)
def test_an_element_type_is_loaded_into_one_that_has_all_its_values(here, there, all_of_it):
    assert holds(getattr(torch, here), getattr(torch, there)) is all_of_it
