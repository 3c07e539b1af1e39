"""States that have not their tensor's shape: where their pieces lie, and what is caught when one is wrong."""

from dataclasses import replace

import pytest
import torch
from tests.plans.cases import ANY_FORM, LAYERS, layout, small
from tests.stamped import box_of, granules, job, owns, same_bits, stamp
from torch import nn

from dynatrain.execute.census import compare, digest_vector, unequal_copies
from dynatrain.execute.pieces import Piece, misfits
from dynatrain.judge.judge import judge_all
from dynatrain.plan.build import rank_plan
from dynatrain.plan.schedule import keep_schedule
from dynatrain.space.ownership import declared
from dynatrain.space.tensor import State, Tensor
from dynatrain.train.live import Entry
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.several import Several
from dynatrain.train.states import create_optimizer_state, optimizer_states

ROW, COLUMN = State("row", "float32", reduced=(1,)), State("column", "float32", reduced=(0,))
SCALE, CODES = State("scale", "float32", block=256), State("codes", "uint8")
DOWN = Tensor("down", (5, 600), (("tp", 1), ("fsdp", 0)), (0,), (ROW, COLUMN, SCALE, CODES), "")


@pytest.mark.parametrize(
    ("state", "shape", "boxes", "copies"),
    [
        (ROW, (5,), [((0, 3),), ((0, 3),), ((3, 5),), ((3, 5),)], 2),
        (COLUMN, (600,), [((0, 300),), ((300, 600),)] * 2, 2),
        (SCALE, (5, 3), [((0, 3), (0, 3))] * 2 + [((3, 5), (0, 3))] * 2, 2),
        (CODES, (5, 600), [((a, b), ends) for a, b in ((0, 3), (3, 5)) for ends in ((0, 300), (300, 600))], 1),
    ],
    ids=["row", "column", "scale", "codes"],
)
def test_a_state_is_cut_by_the_axes_that_cut_what_it_shares_with_its_tensor(state, shape, boxes, copies):
    own = declared((DOWN,), layout(fsdp=2, tp=2), 1)
    assert DOWN.state_shape(state) == shape
    assert [own.state_box(DOWN, state, rank) for rank in range(4)] == boxes
    assert own.copies(DOWN, state) == copies


def test_a_rank_with_an_empty_piece_holds_the_factors_that_its_rows_do_not_cut():
    few = replace(DOWN, shape=(2, 600))
    own = declared((few,), layout(fsdp=4), 1)
    assert own.box(few, 3) == ((2, 2), (0, 600))
    assert [own.state_box(few, state, 3) for state in (ROW, COLUMN)] == [((2, 2),), ((0, 600),)]


def test_factors_of_a_stack_keep_their_other_dims_cuts():
    stack = Tensor("experts", (4, 6, 9), (("tp", 2), ("fsdp", 0)), (0,), (), "")
    column = State("column", "float32", reduced=(1,))
    own = declared((stack,), layout(fsdp=2, tp=3), 1)
    assert own.placed(stack, column).cuts == (("tp", 1), ("fsdp", 0))
    assert own.state_box(stack, column, 5) == ((2, 4), (6, 9))


CATALOGUE = small(width=8, inner=12, vocabulary=16, states=ANY_FORM)
OLD = declared(CATALOGUE, layout(fsdp=2, tp=2), LAYERS)
NEW = declared(CATALOGUE, layout(pp=2, fsdp=2), LAYERS)


@pytest.mark.parametrize("name", ["row", "column", "scale", "codes", "step"])
def test_a_state_that_is_left_out_of_a_plan_is_named_by_the_judge(name):
    state = next(number for number, one in enumerate(ANY_FORM) if one.name == name)

    def without(moves):
        for move in moves:
            kept = tuple(one for one in move.states if (move.tensor, one) != (1, state))
            if kept:
                yield replace(move, states=kept)

    parts = [rank_plan(CATALOGUE, OLD, NEW, rank, keep_schedule(CATALOGUE, 1000)) for rank in range(4)]
    assert judge_all(CATALOGUE, OLD, NEW, parts).problems == ()
    wrong = [
        replace(
            part,
            **{kind: tuple(without(getattr(part, kind))) for kind in ("sends", "receives", "relays")},
            adopted=tuple(granule for granule in part.adopted if granule != (1, state)),
        )
        for part in parts
    ]
    found = judge_all(CATALOGUE, OLD, NEW, wrong)
    assert any(f"layers.0.up.{name} " in problem and "missing" in problem for problem in found.problems)
    assert found.coverage[name].missing > 0


JOB = job()
FACTORED = next(index for index, tensor in enumerate(JOB) if tensor.name == "layers.1.wo")


def digests(own, cut, spoil=lambda _rank, _pieces: None):
    """The digests of stamped pieces of all ranks, added up."""
    total = 0
    for rank in range(own.layout.world_size):
        held = {granule: box_of(JOB, own, granule, rank) for granule in granules(JOB)}
        pieces = {granule: Piece(stamp(JOB, granule, box), box) for granule, box in held.items() if box is not None}
        spoil(rank, pieces)
        total += digest_vector(pieces, JOB, own, cut, rank)
    return total


@pytest.mark.parametrize("name", ["row", "column", "scale"])
def test_a_stale_replica_of_a_state_is_named_before_the_switch(name):
    old, new = owns(JOB, "fsdp2.tp2"), owns(JOB, "tp4")
    number = next(at for at, state in enumerate(JOB[FACTORED].states) if state.name == name)

    def spoil(rank, pieces):
        if rank == 3:
            pieces[FACTORED, number].tensor.view(-1).view(torch.uint8)[0] ^= 1

    assert unequal_copies(digests(old, new), JOB, old, new) == ()
    stale = old.copy_index(JOB[FACTORED], 3, JOB[FACTORED].states[number])
    assert unequal_copies(digests(old, new, spoil), JOB, old, new) == (("layers.1.wo", name, stale),)


def test_digests_of_every_form_are_equal_in_every_layout():
    first = owns(JOB, "fsdp4")
    before = digests(first, first)
    for text in ("tp4", "pp2.fsdp2", "fsdp2.tp2", "dp4"):
        new = owns(JOB, text)
        report = compare(digests(first, new), digests(new, new), JOB, first, new)
        assert report.equal
        assert report.before == compare(before, before, JOB, first, first).before


def test_a_step_that_two_optimizers_share_is_found():
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))]
    both = Several([torch.optim.AdamW(params[:1]), Adafactor(params[1:])])
    create_optimizer_state(both)

    def found():
        entries = {
            f"p{i}": Entry(f"p{i}", value, [(0, f"p{i}")], "param", 12, tuple(value.shape))
            for i, value in enumerate(params)
        }
        states = optimizer_states(both, entries)
        catalogue = tuple(Tensor(name, (4, 3), (), (), tuple(held), "") for name, held in states.items())
        pieces = {
            (index, number): Piece(value, tuple((0, size) for size in value.shape))
            for index, held in enumerate(states.values())
            for number, value in enumerate(held.values())
        }
        return misfits(pieces, catalogue)

    assert found() == []
    both.state[params[1]]["step"] = both.state[params[0]]["step"].view(())
    assert found() == ["p1 step: shares its storage with p0 step, so neither can be given up alone"]


def test_stamps_of_one_byte_tell_their_places():
    whole = stamp(JOB, (FACTORED, len(JOB[FACTORED].states) - 4), ((0, 6), (0, 12)))
    assert whole.dtype == torch.uint8
    assert not same_bits(whole, whole.roll(1, 0))
