"""Validation: one number in every layout, and training as if it had not been."""

from dataclasses import replace

import torch
from tests import oracle
from tests.jobs import Asking, Books, Case, everywhere, expected, switcher
from tests.shapes import small_shape
from torch.nn import functional

from dynatrain.data.order import batch_ids
from dynatrain.data.samples import Samples
from dynatrain.layout.text import print_layout
from dynatrain.train.trainer import Trainer
from dynatrain.train.validation import Validation

SHAPE = small_shape(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
CASE = Case(tour=("fsdp4", "pp2v2-zbv.dp2", "dp2.tp2-sp"), steps_each=3, shape=SHAPE)
HELD_OUT, TOKENS, BATCHES = 7, 32, 3
"""Held-out samples: a global batch of four, and three more."""


def held_out():
    tokens = torch.randint(CASE.shape.vocab_size, (HELD_OUT * TOKENS + 1,), generator=torch.Generator().manual_seed(9))
    return Samples(tokens=tokens.numpy().astype("uint16"), sequence=TOKENS)


def plain_loss(held):
    """The mean over all targets by the oracle, on one process, without dropout."""
    weights = {name: value for (name, state), value in held.items() if state == "param"}
    inputs, targets = map(torch.from_numpy, held_out().batch(torch.arange(HELD_OUT).numpy()))
    out = oracle.logits(weights, replace(CASE.shape, dropout=0.0), torch.arange(HELD_OUT), inputs, "")
    return functional.cross_entropy(out.flatten(0, 1), targets.flatten()).item()


def train(world, every):
    """The tour; what was validated, the steps' results, and this rank's state at the end of each visit."""
    books = Books()
    sw = switcher(CASE.job(), world, CASE.tour[0], recorder=books)
    for number, layout in enumerate(CASE.tour[1:], 1):
        sw.request(layout, at=number * CASE.steps_each)
    data, measured, steps, states = Asking(held_out()), [], [], []

    def after_step(result):
        steps.append((result.loss, result.grad_norm))
        if result.step % CASE.steps_each == CASE.steps_each - 1:
            states.append({key: value.clone() for key, value in sw.world.values().items()})

    def after_validation(result):
        assert not sw._course._settling  # no switch is between its move and its commit
        for part in sw.world.parts:
            assert all(module.training for module in part.modules())
            assert not part._get_fsdp_state()._comm_ctx.post_forward_order  # or the next backward prefetches by it
        measured.append((result, print_layout(sw.layout), data.take()))

    validation = Validation(data=data, every=every, batches=BATCHES) if every else None
    more = {"validation": validation, "after_validation": after_validation}
    Trainer(CASE.job(), CASE.data(), sw, after_step, **more).run(CASE.steps)
    return measured, steps, states, [outcome for outcome, *_ in books.switches]


def test_the_loss_is_that_of_one_process_in_every_layout_and_training_has_the_same_bits_without_it():
    _, visits = expected(CASE)
    numbers = [plain_loss(held) for held in visits]
    assert len({f"{number:.6f}" for number in numbers}) == len(numbers)  # it is seen which weights were used

    with_it = everywhere(4, lambda world: train(world, 1), 100)
    without = everywhere(4, lambda world: train(world, 0), 100)

    for (measured, steps, states, ends), (nothing, other_steps, other_states, _) in zip(with_it, without, strict=True):
        assert ends == ["committed"] * (len(CASE.tour) - 1)
        assert [layout for _, layout, _ in measured[:: CASE.steps_each]] == list(CASE.tour)
        assert [result.step for result, _, _ in measured] == list(range(CASE.steps))
        assert {(result.samples, result.tokens) for result, _, _ in measured} == {(HELD_OUT, HELD_OUT * TOKENS)}
        losses = [result.loss for result, _, _ in measured]
        assert losses == [result.loss for result, _, _ in with_it[0][0]]  # the same bits on every rank
        for number, loss in zip(numbers, losses[CASE.steps_each - 1 :: CASE.steps_each], strict=True):
            assert abs(loss - number) < 1e-12

        assert not nothing
        assert steps == other_steps
        for one, other in zip(states, other_states, strict=True):
            assert all(torch.equal(value, other[key]) for key, value in one.items())

    order = batch_ids(CASE.seed, 0, HELD_OUT, HELD_OUT).tolist()
    asked = [ids for measured, *_ in with_it for _, layout, ids in measured if layout == "fsdp4"]
    assert set().union(*asked) == set(order)
    assert max(map(len, asked)) == 2  # one micro-batch of each global batch
