"""A small training job in forked ranks, for tests that disturb its switches."""

import contextlib
import hashlib
import os
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.models.decoder import canonical_name
from dynatrain.plan.schedule import STAGING_BYTES
from dynatrain.space.decoder import DecoderShape
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Job, Trainer

SHAPE = DecoderShape(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    vocab_size=61,
    tie_word_embeddings=False,
    norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    dropout=0.1,
)
JOB = Job(
    shape=SHAPE,
    seed=1,
    precision=Precision(compute="fp32"),
    # Exact, so that the norm has equal bits in dp, fsdp and their mixes.
    optimizer=OptimizerSettings(lr=1e-2, warmup_steps=3, total_steps=2000, exact_norm=True),
    global_sequences=4,
    micro_sequences=1,
)
ROUND_BYTES = 64 << 10
"""Several rounds in ``keep``."""
BUDGET = STAGING_BYTES + (16 << 10)
"""Several rounds in ``tight``."""


class Samples:
    """A thousand samples of noise, each a function of its number."""

    def __len__(self):
        return 1000

    def batch(self, ids):
        made = np.stack([np.random.default_rng(int(i)).integers(0, SHAPE.vocab_size, 17) for i in ids])
        return made[:, :-1].copy(), made[:, 1:].copy()

    def documents(self, ids):  # noqa: ARG002 - the face of data
        return None


class DoneError(Exception):
    """The test has seen enough."""


def sit_down(world):
    """Make this process a rank: default group, quiet, at the priority of ranks."""
    warnings.filterwarnings("ignore")
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    store = dist.PrefixStore("default", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=60))


def switcher(world, layout, **more):
    """A ``Switcher`` over the job, as the rank's entry makes it."""
    given = {
        "deadline": 15.0,
        "budget": BUDGET,
        "round_bytes": ROUND_BYTES,
        "state": {"schedule": JOB.scheduler},
    } | more
    host, port = world.store.host, world.store.port
    board = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20))
    return Switcher(
        JOB.build,
        layout=layout,
        initial=JOB.initial,
        names=canonical_name,
        board=Board(dist.PrefixStore("board", board), world.size),
        store=dist.PrefixStore("groups", world.store),
        **given,
    )


def train(sw, after_step, until=100_000):
    """Train until ``until``, or until ``after_step`` raises :class:`DoneError`."""
    with contextlib.suppress(DoneError):
        Trainer(JOB, Samples(), sw, after_step).run(until)


def array(tensor):
    """A numpy view; ``Tensor.numpy`` would pin the storage for good."""
    return np.from_dlpack(tensor.detach())


def local_bits(sw):
    """A hash of everything that this rank holds."""
    found = hashlib.sha256()
    for key, value in sorted(sw.world.values().items()):
        found.update(repr(key).encode() + array(value).tobytes())
    return found.hexdigest()


def shares(sw, rank):
    """This rank's share of a digest of every (tensor, state) that does not depend on the cut: summed over ranks."""
    world, values, found = sw.world, sw.world.values(), {}
    for tensor in world.catalogue:
        if tensor.name not in world.found:
            continue
        box, first = world.ownership.box(tensor, rank), world.ownership.copy_index(tensor, rank) == 0
        for state in tensor.states:
            value = array(values[tensor.name, state.name])
            if state.scalar:
                found[tensor.name, state.name, float(value)] = 0  # every rank that has it must have the same
            elif first:
                found[tensor.name, state.name] = share(value, box, tensor.shape)
    return found


def share(value, box, shape):
    """The sum of an array's words, each weighted by its index in the tensor."""
    index = np.zeros((), np.uint64)
    for (start, stop), size in zip(box, shape, strict=True):
        index = index[..., None] * np.uint64(size) + np.arange(start, stop, dtype=np.uint64)
    words = value.view(f"u{value.itemsize}").astype(np.uint64)
    with np.errstate(over="ignore"):
        return int((words * (index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))).sum(dtype=np.uint64))


def summed(all_shares):
    """The digest of the whole job from all ranks' :func:`shares`."""
    total = {}
    for one in all_shares:
        for key, value in one.items():
            total[key] = (total.get(key, 0) + value) % (1 << 64)
    return total


FLIPPED = "layers.1.mlp.up_proj.weight"
PLACE = (3, 5)
"""In the local piece of the rank that is disturbed."""


def flip(world, state, rank):
    """Flip a bit of one element that a rank of a ``World`` holds; the element's index in the tensor."""
    tensor = next(tensor for tensor in world.catalogue if tensor.name == FLIPPED)
    box = world.ownership.box(tensor, rank)
    world.values()[FLIPPED, state].view(torch.int32)[PLACE] ^= 1 << 18  # one that the next steps do not round away
    return tuple(start + at for (start, _), at in zip(box, PLACE, strict=True))
