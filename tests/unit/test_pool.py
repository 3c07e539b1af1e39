"""Memory of pieces: given back for all holders, restored for all, counted."""

import torch

from dynatrain.execute.pieces import Piece, Pool


def test_memory_given_back_is_gone_for_every_alias_and_restored_for_every_alias():
    pool = Pool()
    piece = Piece(pool.allocate((3, 4), torch.float32, 64), ((0, 3), (0, 4)))
    alias = piece.tensor.view(-1)
    assert (pool.held, piece.nbytes) == (64, 64)
    pool.give_back(piece)
    assert (pool.held, alias.untyped_storage().nbytes()) == (0, 0)
    pool.give_back(piece)
    pool.restore(piece)
    pool.restore(piece)
    piece.tensor.fill_(3)
    assert alias.sum() == 36
    assert (pool.held, pool.peak) == (64, 64)


def test_padding_is_zero_when_allocated_and_when_restored():
    for pool in (Pool(), Pool(poison=True)):
        tensor = pool.allocate((3,), torch.float32, 40)
        padding = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[12:]
        padding.fill_(9)
        piece = Piece(tensor, ((0, 3),))
        pool.give_back(piece)
        pool.restore(piece)
        assert torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[12:].sum() == 0


def test_poison_is_visible_in_every_dtype():
    pool = Pool(poison=True)
    assert pool.allocate((4,), torch.bfloat16).isnan().all()
    assert (pool.allocate((4,), torch.int64) == 0x7F7F7F7F7F7F7F7F).all()


def test_the_peak_counts_what_is_held_at_once():
    pool = Pool()
    pool.hold([Piece(torch.zeros(10), ((0, 10),))])
    one = pool.allocate((20,), torch.uint8)
    pool.drop(one)
    pool.drop(pool.allocate((15,), torch.uint8))
    assert (pool.held, pool.peak) == (40, 60)
