"""From what the text says to what the model makes of it: one value per meaning."""

import dataclasses

from dynatrain.layout.layout import Layout
from dynatrain.layout.stages import default_split


def resolve(layout: Layout, num_layers: int) -> Layout:
    """``layout`` with its pipeline split pinned where the layers do not divide, and nothing said that goes without.

    A pinned split that is the even one, and an identity rank order, are left out, so that two layouts that do the same
    are equal values with one print. Expects a layout that is legal for ``num_layers``.
    """
    split = layout.stages or default_split(num_layers, layout.num_stages)
    return dataclasses.replace(
        layout,
        stages=() if len(set(split)) == 1 else split,
        order=() if layout.order == tuple(range(layout.world_size)) else layout.order,
    )
