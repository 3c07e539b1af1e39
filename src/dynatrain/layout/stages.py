"""Which layers each pipeline stage holds."""

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
    """Global layer numbers of each stage, first stage first."""
    sizes = layout.stages or default_split(num_layers, layout.size("pp"))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
