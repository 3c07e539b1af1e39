"""One forward and backward of a small job in a layout, many layouts on the same ranks: what is left before a step."""

import math

import torch
import torch.distributed as dist
from tests import oracle
from tests.jobs import batch_of, beginning

from dynatrain.data.order import batch_ids
from dynatrain.execute.pieces import Pool
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.space.box import volume, whole, within
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared
from dynatrain.train import trainer
from dynatrain.train.groups import Connections, GroupPool, building
from dynatrain.train.live import entries
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.world import World


def groups_of(world):
    """A pool for all layouts of one session of ranks."""
    return GroupPool(
        Connections(dist.PrefixStore("groups", world.store)),
        rank=world.rank,
        world="g0",
        backend="gloo",
        timeout_seconds=60,
    )


class Backward:
    """The first batch of ``case`` in a layout, on this rank; owned as the catalogue declares.

    Attributes:
        world: modules with their initial values.
    """

    def __init__(self, groups, case, text):
        self.job, layout = case.job(), parse_layout(text)
        mesh = groups.mesh(layout, "cpu")
        with building(groups, layout, "cpu"), torch.device("meta"):
            parts, optimizer = self.job.build(mesh, layout)
        self.world = World(layout, mesh, parts, optimizer, entries(parts, canonical_name))
        self.job.initial(self.world, Pool())
        self.world.catalogue = catalogue(case.shape, "float64", optimizer="")
        self.world.ownership = declared(self.world.catalogue, layout, case.shape.num_hidden_layers)
        self._bound, self._data, self.rank = trainer._Bound(self.job, self.world, None), case.data(), groups.rank

    def run(self):
        """Loss and global norm; every parameter has its gradient."""
        for entry in self.world.found.values():
            entry.value.grad = None
        ids = batch_ids(self.job.seed, 0, self.job.global_sequences, len(self._data))
        batches, tokens = self.job.sharing.micro_batches(self._data, ids, self.world.layout, self._bound.at, "cpu")
        losses = self._bound.forward_backward(0, batches, tokens, range(self.job.num_micro_batches))
        return self._bound.totals(losses)

    def stored(self):
        """``{tensor: bytes}`` of this rank's shards, padding included."""
        return {name: entry.stored * entry.value.itemsize for name, entry in self.world.found.items()}

    def apart(self, expected):
        """``{what: largest difference}`` of the loss, the norm and this rank's gradients from :func:`alone`'s."""
        loss, norm = self.run()
        found = {"loss": abs(loss - expected[0]), "norm": abs(norm - expected[2])}
        tensors = {tensor.name: tensor for tensor in self.world.catalogue}
        for name, entry in self.world.found.items():
            box = self.world.ownership.box(tensors[name], self.rank)
            if entry.kind == "param" and volume(box):
                want = expected[1][name][within(box, whole(tensors[name].shape))]
                found[name] = math.inf if entry.value.grad is None else _far(local_tensor(entry.value.grad), want)
        return found


def alone(case):
    """The oracle's loss, gradients by name and global norm of the first batch."""
    weights, held = oracle.split(beginning(case))
    loss, gradients, _ = oracle.differentiated(weights, held, case.shape, list(batch_of(case, 0)), f"{case.seed}/0")
    return loss.item(), dict(zip(weights, gradients, strict=True)), oracle.norm_of(gradients)


def _far(value, want):
    assert value.shape == want.shape
    worst = (value - want).abs().max().item()
    return math.inf if math.isnan(worst) else worst
