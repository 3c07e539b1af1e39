"""A folder is read into any live layout and written from any, each rank its own boxes, bit by bit."""

import torch
import torch.distributed as dist
from tests.jobs import Books, Case, everywhere, switcher
from tests.shapes import small_shape
from tests.shelves import export, into_pieces, into_shelf, load, misplaced, random_weights, visits

from dynatrain.execute.hf_export import Export
from dynatrain.execute.hf_folder import open_folder

SHAPE = small_shape(
    family="gpt2", num_key_value_heads=4, num_hidden_layers=4, tie_word_embeddings=True, max_position_embeddings=63
)
"""The form whose files are fused and transposed; its rows of words and positions are uneven in every cut."""

TOUR = ("fsdp4", "fsdp2.tp2", "pp2.tp2-sp", "dp2.fsdp2", "tp4", "pp4")


def walk(world, source, right, out):
    job = Case(tour=(), shape=SHAPE, compute="fp32").job()
    books, told = Books(), []
    sw = switcher(job, world, TOUR[0], recorder=books)
    for layout in visits(sw, books, TOUR):
        told.append(misplaced(sw.world, world.rank, right))
        into_pieces(open_folder(source, SHAPE), sw.world, world.rank)
        told.append(misplaced(sw.world, world.rank, right))
        options = {"dtype": "fp32", "max_shard_bytes": 50_000}
        made = [Export.create(out / layout, SHAPE, **options) if world.rank == 0 else None]
        dist.broadcast_object_list(made)
        into_shelf(made[0].open(), sw.world, world.rank)
        dist.barrier()
        if world.rank == 0:
            made[0].finish()
    return told


def test_every_layout_reads_and_writes_a_folder_bit_by_bit(tmp_path):
    right = random_weights(SHAPE)
    source = export(tmp_path / "source", SHAPE, right, dtype="bf16")
    right = {name: value.bfloat16().float() for name, value in right.items()}

    for told in everywhere(4, lambda world: walk(world, source, right, tmp_path), 100):
        assert told[0]  # before the first reading nothing is right
        assert told[1:] == [[]] * (2 * len(TOUR) - 1)
    for layout in TOUR:
        written = load(tmp_path / layout, SHAPE)
        assert all(torch.equal(written[name], value) for name, value in right.items())
