"""Training on packed documents: in every layout as if each document were a sequence of its own."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests import oracle
from tests.jobs import SHAPE, TOKENS, Case, distance, everywhere, expected, switcher
from torch.nn import functional

from dynatrain.train.trainer import Trainer
from dynatrain.train.validation import Validation


class Packed(Case):
    """A case whose documents have 1 to 39 tokens: some end in a sample, some begin before it."""

    def data(self):
        lengths = np.random.default_rng(self.seed).integers(1, 40, self.samples * TOKENS)
        starts = np.concatenate([[0], lengths.cumsum()])
        data = super().data()
        return replace(data, starts=starts[starts < len(data.tokens)])


CASE = Packed(tour=("pp2.fsdp2", "dp2.tp2-sp"), steps_each=2, shape=replace(SHAPE, dropout=0.0, num_hidden_layers=2))
"""Without dropout, whose masks are keyed by the place in the sample."""


def logits_alone(logits):
    """``oracle.logits``, each document by itself."""
    data = CASE.data()

    def packed(w, shape, samples, tokens, run, beside=None):
        rows = []
        for sample, row, starts in zip(samples, tokens, data.documents(samples.numpy()), strict=True):
            cuts = [*np.unique(starts).tolist(), len(row)]
            parts = [logits(w, shape, sample[None], row[None, first:end], run, beside) for first, end in pairwise(cuts)]
            rows.append(torch.cat(parts, dim=1))
        return torch.cat(rows)

    return packed


def held_out_loss(held):
    """Of the first four samples of the validation's order."""
    ids = Validation(data=CASE.data(), every=2, batches=1).ids(CASE.seed, 4)
    inputs, targets = map(torch.from_numpy, CASE.data().batch(ids))
    weights = {name: value for (name, state), value in held.items() if state == "param"}
    out = oracle.logits(weights, CASE.shape, torch.from_numpy(ids), inputs, "")
    return functional.cross_entropy(out.flatten(0, 1), targets.flatten()).item()


@pytest.fixture
def by_the_oracle(monkeypatch):
    monkeypatch.setattr(oracle, "logits", logits_alone(oracle.logits))
    losses, visits = expected(CASE)
    return losses, visits, [held_out_loss(held) for held in visits]


def test_a_document_is_trained_on_as_if_alone_in_every_layout(by_the_oracle):
    losses, visits, held_out = by_the_oracle

    def work(world):
        sw = switcher(CASE.job(), world, CASE.tour[0])
        sw.request(CASE.tour[1], at=CASE.steps_each)
        found, apart, measured = [], [], []

        def after_step(result):
            found.append(result.loss)
            if result.step % CASE.steps_each == CASE.steps_each - 1:
                apart.append(distance(sw.world, world.rank, visits[result.step // CASE.steps_each]))

        validation = Validation(data=CASE.data(), every=CASE.steps_each, batches=1)
        more = {"validation": validation, "after_validation": lambda result: measured.append(result.loss)}
        Trainer(CASE.job(), CASE.data(), sw, after_step, **more).run(CASE.steps)
        return found, apart, measured

    for found, apart, measured in everywhere(4, work):
        assert found == pytest.approx(losses, rel=0, abs=1e-12)
        assert measured == pytest.approx(held_out, rel=0, abs=1e-12)
        assert max(max(states.values()) for states in apart) < 1e-12
