"""Which layers each pipeline stage holds, and which pp rank holds each stage."""

from dynatrain.layout.layout import Layout


def default_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage where the text does not pin them: sizes differ by at most one, the lighter stages outermost.

    First and last stage also carry the embedding and the head, so they are the first to get one layer less; the spare
    light stages are then dealt alternately from both ends.
    """
    base, extra = divmod(num_layers, num_stages)
    light = num_stages - extra
    sizes = [base + 1] * num_stages
    for i in range(light):
        sizes[i // 2 if i % 2 == 0 else -1 - i // 2] = base
    return tuple(sizes)


def stage_ranges(layout: Layout, num_layers: int) -> tuple[range, ...]:
    """Global layer numbers of each stage, first stage first: of pp x chunks stages."""
    sizes = layout.stages or default_split(num_layers, layout.num_stages)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stage_ranks(layout: Layout) -> tuple[int, ...]:
    """Index along pp of the rank that holds each stage, first stage first.

    Stages go round the pp ranks; under ``zbv`` they go down them and back up, so that the first and the last stage are
    on one rank (zero bubble V schedule, arXiv 2401.10241, section 6).
    """
    pp, stages = layout.size("pp"), layout.num_stages
    if layout.schedule == "zbv":
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % pp for stage in range(stages))


def held_stages(layout: Layout, pp: int) -> tuple[int, ...]:
    """Numbers of the stages that the rank at index ``pp`` along pp holds, ascending."""
    return tuple(stage for stage, rank in enumerate(stage_ranks(layout)) if rank == pp)
