"""Our optimizers in one process beside literal formulas and other people's; what several together hold."""

import copy

import pytest
import torch
import transformers.optimization
from torch import nn

from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.space.decoder import catalogue
from dynatrain.space.optimizers import OPTIMIZERS, STEP
from dynatrain.space.presets import resolve_model
from dynatrain.space.tensor import State
from dynatrain.train.live import Entry
from dynatrain.train.optimizer import OptimizerSettings, optimizer_of
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.adamw8bit import SIGNED, UNSIGNED, AdamW8bit, block_scales, dequantise, quantise
from dynatrain.train.optimizers.muon import COEFFICIENTS, Muon, orthogonal
from dynatrain.train.optimizers.schema import SCHEMAS, kept
from dynatrain.train.optimizers.several import Several
from dynatrain.train.states import UnknownStateError, create_optimizer_state, optimizer_states

SHAPES = ((7, 5), (5, 300), (6,), (3, 4, 5))


def parameters(dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def train(optimizer, params, steps=4):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        optimizer.step()
    return params


def furthest(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def test_adafactor_is_that_of_transformers():
    ours, theirs = parameters(), parameters()
    train(Adafactor(ours, lr=1e-2, weight_decay=0.1), ours)
    train(
        transformers.optimization.Adafactor(
            theirs, lr=1e-2, weight_decay=0.1, scale_parameter=False, relative_step=False, warmup_init=False
        ),
        theirs,
    )
    assert furthest(ours, theirs) <= 1e-13


def test_muon_in_bf16_is_torchs():
    shapes = ((7, 5), (5, 300))
    ours, theirs = parameters(torch.float32, shapes), parameters(torch.float32, shapes)
    train(Muon(ours, lr=1e-2, weight_decay=0.1, bf16=True), ours)
    train(torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), theirs)
    assert furthest(ours, theirs) <= 1e-3  # a step moves elements by about 2e-3; bf16 keeps three digits of it
    assert furthest(ours, parameters(torch.float32, shapes)) > 5e-3


@pytest.mark.parametrize("shape", [(7, 5), (5, 9), (2, 6, 4)])
def test_an_orthogonal_factor_is_the_quintic_of_the_singular_values(shape):
    matrix = parameters(shapes=(shape,))[0].detach()
    left, values, right = torch.linalg.svd(matrix / torch.linalg.matrix_norm(matrix, keepdim=True), full_matrices=False)
    for _ in range(5):
        values = sum(c * values ** (2 * i + 1) for i, c in enumerate(COEFFICIENTS))
    torch.testing.assert_close(orthogonal(matrix, 5), left * values.unsqueeze(-2) @ right, rtol=0, atol=1e-12)


def test_muon_takes_matrices_alone():
    with pytest.raises(ValueError, match=r"\[\(6,\)\].*AdamW takes the rest"):
        Muon(parameters())


@pytest.mark.parametrize("book", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_a_code_is_the_nearest_entry_and_its_error_is_within_the_stated_bound(book):
    values = torch.randn(3, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) ** 3
    values = values if book is SIGNED else values.square()
    scales = block_scales(values, (0, 600), 600)
    each = scales.repeat_interleave(256, -1)[:, :600].double()
    assert scales.shape == (3, 3)
    codes = quantise(values, scales, book, (0, 600))
    nearest = (values[..., None] / each[..., None] - book.double()).abs().argmin(-1)
    apart = (book.double()[codes.int()] - book.double()[nearest]).abs()
    assert apart.max() <= 1e-6  # a tie between two entries in fp32
    shares, back = values / each, dequantise(codes, scales, book, (0, 600)) / each
    power, step = (1 / 2, 1 / 127) if book is SIGNED else (1 / 4, 1 / 256)
    assert (shares.abs() ** power - back.abs() ** power).abs().max() <= step * (1 + 1e-5)


def test_adamw8bit_stays_near_adamw_and_keeps_vectors_exactly():
    ours, theirs = parameters(), parameters()
    train(AdamW8bit(ours, lr=1e-3, weight_decay=0.1), ours, 20)
    train(torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1), theirs, 20)
    assert furthest(ours[2:3], theirs[2:3]) <= 1e-15
    assert 1e-6 < furthest(ours, theirs) <= 5e-3  # of 2e-2 that a parameter moves


def test_a_moment_that_rounds_to_the_least_is_no_zero_to_divide_by():
    param = nn.Parameter(torch.zeros(1, 256))
    optimizer = AdamW8bit([param], lr=1.0, weight_decay=0.0)
    for first in (1e-4, 0.0, 0.0):
        param.grad = torch.full((1, 256), first)
        param.grad[0, 0] = 1e3
        optimizer.step()
    assert param.abs().max() <= 10


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_zero_momentum_buffer_is_none(nesterov):
    ours, theirs = parameters(), parameters()
    optimizer = torch.optim.SGD(ours, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    create_optimizer_state(optimizer)
    assert all(set(optimizer.state[param]) == {"momentum_buffer"} for param in ours)
    train(optimizer, ours)
    train(torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_sgd_without_momentum_keeps_nothing_and_with_dampening_is_refused():
    params = parameters()
    plain = torch.optim.SGD(params, lr=0.1)
    create_optimizer_state(plain)
    assert not any(plain.state.values())
    with pytest.raises(UnknownStateError, match=r"dampening 0.5.*set dampening to 0"):
        create_optimizer_state(torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5))


def two(params):
    return Several([Muon(params[:2], lr=1e-2), torch.optim.AdamW([{"params": params[2:]}, {"params": []}], lr=1e-2)])


def test_several_optimizers_step_as_each_alone():
    together, apart = parameters(), parameters()
    both = two(together)
    create_optimizer_state(both)
    train(both, together)
    alone = Muon(apart[:2], lr=1e-2), torch.optim.AdamW(apart[2:], lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for param in apart:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        for one in alone:
            one.step()
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert [len(group["params"]) for group in both.param_groups] == [2, 2, 0]
    with pytest.raises(ValueError, match="1 parameter"):
        Several([Muon(apart[:2]), torch.optim.AdamW(apart[1:])])


def test_several_optimizers_load_what_they_saved():
    first, second = parameters(), parameters()
    both, other = two(first), two(second)
    train(both, first)
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    for param, value in zip(second, first, strict=True):
        param.data = value.data.clone()
    train(both, first)
    train(other, second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def held(optimizer, params):
    found = {
        f"p{i}": Entry(f"p{i}", param, [(0, f"p{i}")], "param", param.numel(), tuple(param.shape))
        for i, param in enumerate(params)
    }
    return optimizer_states(optimizer, found)


def test_state_that_is_not_in_the_schema_or_missing_or_misshapen_is_refused_with_its_name():
    params = parameters()
    optimizer = Adafactor(params)
    create_optimizer_state(optimizer)
    assert [state.name for state in held(optimizer, params)["p0"]] == ["exp_avg_sq_col", "exp_avg_sq_row", "step"]
    optimizer.state[params[0]]["extra"] = torch.zeros(3)
    del optimizer.state[params[1]]["step"]
    optimizer.state[params[3]]["exp_avg_sq_row"] = torch.zeros(3)
    with pytest.raises(UnknownStateError) as refusal:
        held(optimizer, params)
    for said in ("extra of p0", "state step of p1 is missing", "exp_avg_sq_row of p3 is shape (3,)", "shape (3, 4)"):
        assert said in str(refusal.value)


def test_an_optimizer_of_a_user_needs_a_schema_and_may_be_given_one(monkeypatch):
    params = parameters()
    optimizer = torch.optim.RMSprop(params)
    with pytest.raises(UnknownStateError, match=r"optim.*RMSprop has no state schema.*AdamW.*Muon"):
        create_optimizer_state(optimizer)
    square = State("square_avg", "float64")
    monkeypatch.setitem(SCHEMAS, torch.optim.RMSprop, lambda _group, _param: (square, STEP))
    create_optimizer_state(optimizer)
    train(optimizer, params)
    assert list(held(optimizer, params)["p0"]) == [square, STEP]


def test_a_frozen_parameter_has_no_state_and_one_without_a_gradient_keeps_none_but_zeros():
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = Adafactor(params)
    create_optimizer_state(optimizer)
    train(optimizer, [params[1]])
    states = held(optimizer, params)
    assert states["p0"] == {}
    assert all(not value.any() for value in states["p2"].values())
    assert all(value.any() for value in states["p1"].values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_declared_for_a_decoder_is_what_its_optimizer_keeps(name):
    shape = resolve_model("tiny")
    with torch.device("meta"):
        layers = range(shape.num_hidden_layers)
        part = DecoderPart(shape, layers, first=True, last=True, streams=KeyedStream(seed=0))
    optimizer = optimizer_of(part, OptimizerSettings(name=name))
    names = {id(param): path for path, param in part.named_parameters()}
    live = {names[id(param)]: states for param, states, _ in kept(optimizer)}
    declared = catalogue(shape, optimizer=name)
    assert live == {tensor.name: tensor.states[1:] for tensor in declared}
