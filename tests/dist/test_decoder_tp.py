"""A decoder part under tensor parallelism computes what it computes alone, dropped elements included."""

import multiprocessing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests import oracle
from tests.shapes import fill, random_batch, small_shape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.models.share import TokenShare
from dynatrain.train.optimizer import OptimizerSettings, adamw

SEED, STEPS, TOKENS = 5, 3, 32
SHAPES = {
    "tied with qk_norm": small_shape(qk_norm=True, tie_word_embeddings=True, dropout=0.2, vocab_size=62),
    "untied": small_shape(dropout=0.2, vocab_size=62),
}


def plan_of(part, *, sp):
    """The parallelize plan of a whole part."""
    stream = Shard(1) if sp else Replicate()
    plan = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    for layer in part.layers:
        at = f"layers.{layer}"
        plan |= {f"{at}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{at}.{name}_proj": RowwiseParallel(output_layouts=stream) for name in ("self_attn.o", "mlp.down")}
        if part.shape.qk_norm:  # a rank sees only its heads: their weights' gradients are shares of a sum
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {f"{at}.self_attn.{name}_norm": heads for name in "qk"}
        if sp:
            gather = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
            plan |= {f"{at}.{name}": gather for name in ("self_attn", "mlp")}
            norm = SequenceParallel(use_local_output=True)
            plan |= {f"{at}.{name}": norm for name in ("input_layernorm", "post_attention_layernorm")}
    return plan | ({"norm": SequenceParallel(use_local_output=True)} if sp else {})


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_on_rank(rank, ranks, store, case, sp, swapped, answers):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    shape = SHAPES[case]
    share = TokenShare(slices=ranks, slice=ranks - 1 - rank if swapped else rank) if sp else TokenShare()
    streams = KeyedStream(seed=SEED, share=share)
    part = DecoderPart(shape, range(shape.num_hidden_layers), first=True, last=True, streams=streams).double()
    fill(part, SEED)
    parallelize_module(part, init_device_mesh("cpu", (ranks,)), plan_of(part, sp=sp))
    part.tie()
    optimizer = adamw(part, OptimizerSettings(lr=1e-2))
    losses = []
    for step in range(STEPS):
        streams.step = step
        ((samples, inputs, targets),) = random_batch(shape, step, micro_batches=1, samples=2, tokens=TOKENS)
        loss = functional.cross_entropy(part(inputs, samples).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    answers.put((rank, losses, {name: whole(value.detach()).numpy() for name, value in part.named_parameters()}))
    dist.barrier()
    dist.destroy_process_group()


def train_in_parallel(store, case, *, sp, swapped=False, ranks=2):
    """Losses and whole weights of rank 0."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=train_on_rank, args=(rank, ranks, store, case, sp, swapped, answers), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    got = {rank: rest for rank, *rest in (answers.get(timeout=100) for _ in processes)}
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * ranks
    assert got[0][0] == got[1][0]
    return got[0]


def train_alone(case):
    """The oracle's losses and weights, at a constant rate: the end of its cosine is out of sight."""
    shape = SHAPES[case]
    part = DecoderPart(
        shape, range(shape.num_hidden_layers), first=True, last=True, streams=KeyedStream(seed=SEED)
    ).double()
    fill(part, SEED)
    start = {name: value.detach() for name, value in part.named_parameters()}
    batches = [random_batch(shape, step, micro_batches=1, samples=2, tokens=TOKENS) for step in range(STEPS)]
    steps = list(oracle.train(start, shape, batches, seed=SEED, rate=1e-2, warmup=0, steps=10**12, clip=float("inf")))
    return [loss for loss, _, _ in steps], steps[-1][1]


@pytest.mark.parametrize("sp", [False, True], ids=["tp2", "tp2-sp"])
@pytest.mark.parametrize("case", SHAPES)
def test_two_ranks_train_like_the_oracle(tmp_path, case, sp):
    losses, weights = train_in_parallel(tmp_path / "store", case, sp=sp)
    expected_losses, expected = train_alone(case)

    assert losses == pytest.approx(expected_losses, abs=1e-12)
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(torch.from_numpy(value), expected[name], rtol=0, atol=1e-12)


def test_a_wrong_slice_of_the_tokens_shows(tmp_path):
    """The planted fault of the test above: either rank's residual stream claims to be the other's."""
    losses, _ = train_in_parallel(tmp_path / "store", "untied", sp=True, swapped=True)

    assert abs(losses[0] - train_alone("untied")[0][0]) > 1e-6
