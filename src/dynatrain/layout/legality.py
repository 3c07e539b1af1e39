"""What a model, a batch and a world allow: every broken rule with its numbers, and the nearest legal layouts."""

from dataclasses import dataclass

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import Layout
from dynatrain.layout.nearest import ranked
from dynatrain.layout.text import print_layout, short_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """The numbers of a model that bound its layouts.

    ``vocab_size`` bounds nothing: rows of the vocabulary are cut in ceil-sized chunks, of which the last may be short.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


def problems(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    sequence: int | None = None,
) -> tuple[str, ...]:
    """Every rule that ``layout`` breaks, one sentence each; empty for a legal layout.

    Args:
        layout: the layout in question.
        limits: what the model bounds.
        world_size: ranks there are; None where the world is free.
        num_microbatches: micro-batches of one global step, over all data ranks; None where the batch is free.
        sequence: tokens of one sequence; None where it is free.
    """
    found = list(form_problems(layout))
    if any(size < 1 for _, size in layout.axes):
        return tuple(found)  # nothing can be divided by such an axis
    found += _tensor_problems(layout, limits, sequence) + _stage_problems(layout, limits.num_layers)
    if world_size is not None and layout.world_size != world_size:
        factors = " x ".join(f"{name}{size}" for name, size in layout.axes) or "no axis"
        found.append(f"the layout has {layout.world_size} ranks ({factors}) but the world has {world_size}")
    if num_microbatches is not None:
        found += _batch_problems(layout, num_microbatches)
    return tuple(found)


def check(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    sequence: int | None = None,
) -> None:
    """Refuse an illegal layout, with all that is wrong and the nearest legal ones. Arguments as :func:`problems`.

    Raises:
        LayoutError: where :func:`problems` finds any.
    """
    found = problems(layout, limits, world_size=world_size, num_microbatches=num_microbatches, sequence=sequence)
    if found:
        near = nearest(layout, limits, world_size=world_size, num_microbatches=num_microbatches, sequence=sequence)
        raise LayoutError(f"{short_layout(layout)} is not legal here", found, tuple(map(print_layout, near)))


def nearest(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    sequence: int | None = None,
    count: int = 3,
) -> tuple[Layout, ...]:
    """At most ``count`` legal layouts, nearest first: fewest changed axes, then least change of size, then by text.

    Empty where no layout of ``world_size`` ranks is legal. Other arguments as :func:`problems`. Deterministic.
    """
    numbers = {"world_size": world_size, "num_microbatches": num_microbatches, "sequence": sequence}
    legal = (near for near in ranked(layout, world_size) if not problems(near, limits, **numbers))
    return tuple(near for near, _ in zip(legal, range(count), strict=False))


def _tensor_problems(layout: Layout, limits: ModelLimits, sequence: int | None) -> list[str]:
    tp = layout.size("tp")
    split = {
        "attention heads": limits.num_heads,
        "key/value heads": limits.num_kv_heads,
        "hidden size": limits.hidden_size,
        "intermediate size": limits.intermediate_size,
    }
    if layout.sp and sequence is not None:
        split["sequence length (-sp)"] = sequence
    return [f"tp{tp} does not divide the {what}, {size}" for what, size in split.items() if size % tp]


def _stage_problems(layout: Layout, num_layers: int) -> list[str]:
    pp = layout.size("pp")
    if pp > num_layers:
        return [f"pp{pp} has more stages than the model has layers, {num_layers}"]
    if layout.stages and sum(layout.stages) != num_layers:
        pinned = "_".join(map(str, layout.stages))
        return [f"pinned stages {pinned} hold {sum(layout.stages)} layers but the model has {num_layers}"]
    return []


def _batch_problems(layout: Layout, num_microbatches: int) -> list[str]:
    # Shares differ by at most one, so the poorest data rank has the rounded-down share.
    ranks, stages = layout.data_ranks, layout.size("pp")
    if num_microbatches // ranks >= stages:
        return []
    need = f"each needs at least {stages}, one per pipeline stage" if stages > 1 else "each needs at least one"
    short = f"{num_microbatches} micro-batches over {ranks} data ranks leave {num_microbatches // ranks} for some"
    return [f"{short}; {need}: {ranks * stages} in all"]
