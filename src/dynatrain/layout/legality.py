"""What a model, a batch and a world allow: every broken rule with its numbers, and the nearest legal layouts."""

import itertools
from dataclasses import dataclass
from typing import Any

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import EXPERT_AXES, Layout
from dynatrain.layout.nearest import ranked
from dynatrain.layout.text import print_layout, short_layout

ONE_ONE, ALL_FIRST = "1f1b", "gpipe"
"""A run's own schedules: one forward, one backward in turn, which needs a micro-batch for each pp rank; or all forwards
first, which takes any number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """The numbers of a model that bound its layouts.

    ``vocab_size`` bounds nothing: rows of the vocabulary are cut in ceil-sized chunks, of which the last may be short.
    ``num_experts`` and ``moe_intermediate_size`` (the width of one expert) are 0 for a dense model.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    moe_intermediate_size: int = 0


def problems(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    sequence: int | None = None,
    schedule: str = ONE_ONE,
) -> tuple[str, ...]:
    """Every rule that ``layout`` breaks, one sentence each; empty for a legal layout.

    Args:
        layout: the layout in question.
        limits: what the model bounds.
        world_size: ranks there are; None where the world is free.
        num_microbatches: micro-batches of one global step, over all data ranks; None where the batch is free.
        sequence: tokens of one sequence; None where it is free.
        schedule: the run's own, of pipelines whose layout names none: ``1f1b`` or ``gpipe``.
    """
    found = list(form_problems(layout))
    if any(size < 1 for _, size in layout.axes) or min(layout.ep, layout.etp, layout.chunks) < 1:
        return tuple(found)  # nothing can be divided by such an axis
    found += _model_problems(layout, limits, sequence)
    if world_size is not None and layout.world_size != world_size:
        factors = " x ".join(f"{name}{size}" for name, size in layout.axes) or "no axis"
        found.append(f"the layout has {layout.world_size} ranks ({factors}) but the world has {world_size}")
    if num_microbatches is not None:
        found += _batch_problems(layout, num_microbatches, schedule)
    return tuple(found)


def check(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    sequence: int | None = None,
    schedule: str = ONE_ONE,
) -> None:
    """Refuse an illegal layout, with all that is wrong and the nearest legal ones. Arguments as :func:`problems`.

    Raises:
        LayoutError: where :func:`problems` finds any.
    """
    given: dict[str, Any] = {
        "world_size": world_size,
        "num_microbatches": num_microbatches,
        "sequence": sequence,
        "schedule": schedule,
    }
    found = problems(layout, limits, **given)
    if found:
        near = nearest(layout, limits, **given)
        raise LayoutError(f"{short_layout(layout)} is not legal here", found, tuple(map(print_layout, near)))


def nearest(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    sequence: int | None = None,
    schedule: str = ONE_ONE,
    count: int = 3,
) -> tuple[Layout, ...]:
    """At most ``count`` legal layouts, nearest first: fewest changed axes, then least change of size, then by text.

    Empty where no layout of ``world_size`` ranks is legal. Other arguments as :func:`problems`. Deterministic.
    """
    given: dict[str, Any] = {
        "world_size": world_size,
        "num_microbatches": num_microbatches,
        "sequence": sequence,
        "schedule": schedule,
    }

    def possible(plain: Layout) -> bool:
        free = num_microbatches is None or not _batch_problems(plain, num_microbatches, schedule)
        return free and not _model_problems(plain, limits, sequence)

    legal = (near for near in ranked(layout, world_size, possible) if not problems(near, limits, **given))
    return tuple(itertools.islice(legal, count))


def _model_problems(layout: Layout, limits: ModelLimits, sequence: int | None) -> list[str]:
    return [
        *_tensor_problems(layout, limits, sequence),
        *_context_problems(layout, limits, sequence),
        *_expert_problems(layout, limits),
        *_stage_problems(layout, limits.num_layers),
    ]


def _tensor_problems(layout: Layout, limits: ModelLimits, sequence: int | None) -> list[str]:
    tp, kv_heads = layout.size("tp"), limits.num_kv_heads
    split = {
        "attention heads": limits.num_heads,
        "hidden size": limits.hidden_size,
        "intermediate size": limits.intermediate_size,
    }
    if (layout.sp or limits.num_experts) and sequence is not None:  # experts: each tp rank routes a slice of the tokens
        tokens, cp = sequence, layout.size("cp")
        if cp > 1 and sequence % cp == 0:
            tokens = sequence // cp  # a cp rank's share is what tp cuts; where cp leaves a rest, that is said elsewhere
        why = "-sp" if layout.sp else "of which each routes a share to experts"
        split[f"sequence length ({why})" if cp == 1 else f"tokens of a cp rank ({why})"] = tokens
    found = [f"tp{tp} does not divide the {what}, {size}" for what, size in split.items() if size % tp]
    if kv_heads % tp and tp % kv_heads:
        # A multiple of them is legal, too: its ranks hold copies.
        found.append(f"tp{tp} does not divide the key/value heads, {kv_heads}, nor is it a multiple of them")
    return found


def _context_problems(layout: Layout, limits: ModelLimits, sequence: int | None) -> list[str]:
    found = []
    cp, tp = layout.size("cp"), layout.size("tp")
    if cp > 1 and sequence is not None and sequence % (2 * cp):
        # Each rank holds a chunk from the front and one from the back, so that causal attention costs all the same.
        near = sorted({max(sequence // (2 * cp), 1) * 2 * cp, (sequence // (2 * cp) + 1) * 2 * cp})
        listed = ", ".join(map(str, near))
        found.append(
            f"cp{cp} cuts the sequence into {2 * cp} chunks, which do not divide {sequence}; nearest: {listed}"
        )
    heads = limits.num_heads // tp
    if layout.cp_method == "ulysses" and limits.num_heads % tp == 0 and heads % cp:
        found.append(
            f"cp{cp}-ulysses does not divide the attention heads of a tp rank, {limits.num_heads} / {tp} = {heads}"
        )
    return found


def _expert_problems(layout: Layout, limits: ModelLimits) -> list[str]:
    ep, etp = layout.ep, layout.etp
    if ep == etp == 1:
        return []
    if not limits.num_experts:
        named = ".".join(f"{axis}{layout.size(axis)}" for axis in EXPERT_AXES if layout.size(axis) > 1)
        return [f"{named} deals out experts, and the model has none; leave it out"]
    found = []
    if limits.num_experts % ep:
        found.append(f"ep{ep} does not divide the experts, {limits.num_experts}")
    if limits.moe_intermediate_size % etp:
        found.append(f"etp{etp} does not divide the intermediate size of an expert, {limits.moe_intermediate_size}")
    return found


def _stage_problems(layout: Layout, num_layers: int) -> list[str]:
    found = []
    if layout.num_stages > num_layers:
        name = f"pp{layout.size('pp')}" + (f"v{layout.chunks}" if layout.chunks > 1 else "")
        found.append(f"{name} has more stages than the model has layers, {num_layers}")
    elif layout.stages and sum(layout.stages) != num_layers:
        pinned = "_".join(map(str, layout.stages))
        found.append(f"pinned stages {pinned} hold {sum(layout.stages)} layers but the model has {num_layers}")
    if layout.schedule and layout.zero == 3 and layout.ways("fsdp") > 1:
        # A backward in two halves loses weight gradients where parameters are freed between them.
        found.append(
            f"-{layout.schedule} under ZeRO-3 gives wrong gradients without an error; keep parameters gathered until "
            "after backward, with -z2 (or -z1) behind fsdp, or behind cp where there is no fsdp"
        )
    return found


def _batch_problems(layout: Layout, num_microbatches: int, schedule: str) -> list[str]:
    # Shares differ by at most one, so the poorest data rank has the rounded-down share.
    in_turn = (layout.schedule or schedule) != ALL_FIRST
    ranks, stages = layout.data_ranks, layout.size("pp") if in_turn else 1
    if num_microbatches // ranks >= stages:
        return _round_problems(layout, num_microbatches) if in_turn else []
    need = f"each needs at least {stages}, one per pipeline stage" if stages > 1 else "each needs at least one"
    short = f"{num_microbatches} micro-batches over {ranks} data ranks leave {num_microbatches // ranks} for some"
    return [f"{short}; {need}: {ranks * stages} in all"]


def least_share(layout: Layout, share: int, schedule: str) -> int:
    """The least number of micro-batches, ``share`` or more, that the pipeline of one data rank takes."""
    pp = layout.size("pp")
    if pp == 1 or (layout.schedule or schedule) == ALL_FIRST:
        return share
    share = max(share, pp)
    while _in_rounds(layout) and share % (share // pp):
        share += 1
    return share


def _in_rounds(layout: Layout) -> bool:
    return layout.schedule != "zbv" and (layout.chunks > 1 or bool(layout.schedule))


def _round_problems(layout: Layout, num_microbatches: int) -> list[str]:
    """Interleaved stages take their micro-batches in equal rounds, of as few as there are pp ranks, or a few more.

    That is how torch's schedules turn from one chunk to the next (Megatron's, arXiv 2104.04473, section 2.2.2, asks for
    a multiple of pp); one round of many would be GPipe, which asks for nothing. Where shares are uneven, fillers make
    them all the longest.
    """
    ranks, pp = layout.data_ranks, layout.size("pp")
    share = -(-num_microbatches // ranks)
    rounds = share // pp
    if not _in_rounds(layout) or share % rounds == 0:
        return []
    near = " or ".join(str(size * pp * ranks) for size in (rounds, rounds + 1))
    what = f"v{layout.chunks}" if layout.chunks > 1 else f"-{layout.schedule}"
    taken = f"{what} takes the {share} micro-batches of a data rank in {rounds} rounds, of {pp} (pp) or a few more each"
    return [f"{taken}; they do not divide evenly; nearest: {near} micro-batches in all"]
