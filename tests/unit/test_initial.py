"""Initial values: any box alone has the bits of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.shapes import small_shape

from dynatrain.models.initial import initial_box, initial_rule
from dynatrain.space.box import whole


def box_of(shape, box, **changes):
    settings = {"seed": 7, "name": "layers.0.mlp.up_proj.weight", "rule": 0.02, "dtype": torch.float32}
    return initial_box(shape=shape, box=box, **(settings | changes))


def slices(box):
    return tuple(slice(*span) for span in box)


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)
    return shape, box


@given(shapes_and_boxes())
def test_a_box_alone_is_bit_equal_to_that_slice_of_the_whole(case):
    shape, box = case

    assert torch.equal(box_of(shape, box), box_of(shape, whole(shape))[slices(box)])


@pytest.mark.parametrize(
    "box", [((1, 290), (0, 300)), ((0, 300), (3, 299)), ((17, 17), (0, 300)), ((250, 300), (7, 8))]
)
def test_boxes_longer_than_a_block_are_bit_equal_too(box):
    shape = (300, 300)

    assert torch.equal(box_of(shape, box), box_of(shape, whole(shape))[slices(box)])


def test_every_dtype_starts_from_the_same_fp32_numbers():
    exact = box_of((50, 60), whole((50, 60)))

    assert torch.equal(box_of((50, 60), whole((50, 60)), dtype=torch.float64), exact.double())
    assert torch.equal(box_of((50, 60), whole((50, 60)), dtype=torch.bfloat16), exact.bfloat16())


def test_values_are_the_stated_formula():
    """Restated for one element: word 2 of block 10 of the stream is element 42."""
    import hashlib  # noqa: PLC0415 - only the restatement needs it

    key = int.from_bytes(hashlib.blake2b(b"7/layers.0.mlp.up_proj.weight", digest_size=16).digest(), "little")
    word = int(np.random.Philox(key=key, counter=10).random_raw(4)[2])
    total = sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131_070

    assert box_of((100,), ((42, 43),)).item() == np.float32(total * (0.02 / ((2**32 - 1) / 3) ** 0.5))


def test_values_look_normal():
    values = box_of((400, 500), whole((400, 500)), rule=1.0).double()

    assert abs(values.mean().item()) < 5 / values.numel() ** 0.5
    assert abs(values.std().item() - 1) < 0.01
    assert values.abs().max().item() < 3.4642
    assert abs((values[:, 1:] * values[:, :-1]).mean().item()) < 5 / values.numel() ** 0.5


@pytest.mark.parametrize("change", [{"seed": 8}, {"name": "layers.1.mlp.up_proj.weight"}])
def test_another_seed_or_name_gives_unrelated_values(change):
    one, other = (box_of((300, 300), whole((300, 300)), rule=1.0, **c).double() for c in ({}, change))

    assert abs((one * other).mean().item()) < 5 / one.numel() ** 0.5


def test_biases_start_at_zero_and_norms_at_one_and_writers_of_the_residual_stream_smaller_with_depth():
    shape = small_shape(num_hidden_layers=8)

    assert initial_rule("norm.weight", shape) == "ones"
    assert initial_rule("layers.3.self_attn.q_norm.weight", shape) == "ones"
    assert initial_rule("layers.3.input_layernorm.weight", shape) == "ones"
    assert initial_rule("layers.3.self_attn.o_proj.weight", shape) == 0.005
    assert initial_rule("layers.3.mlp.down_proj.weight", shape) == 0.005
    assert initial_rule("embed_tokens.weight", shape) == initial_rule("layers.3.mlp.up_proj.weight", shape) == 0.02
    assert initial_rule("norm.bias", shape) == initial_rule("layers.3.self_attn.o_proj.bias", shape) == "zeros"
    assert torch.equal(box_of((3, 4), ((1, 3), (0, 4)), rule="ones"), torch.ones(2, 4))
    assert torch.equal(box_of((3, 4), ((1, 3), (0, 4)), rule="zeros"), torch.zeros(2, 4))
