"""Recipes as the tests run them: each in forked ranks that look to it like those of torchrun."""

import io
import os
import runpy
from contextlib import redirect_stdout

import pytest
from tests import ranks
from tests.cli import ROOT
from tests.dist.foreign import settle_in


def load(world, recipe):
    """What ``recipes/RECIPE.py`` defines, in a rank."""
    settle_in()
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.store.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))


def on_ranks(size, work):
    """What ``work(world)`` returned, which is equal on all ranks."""

    def quiet(world):
        with redirect_stdout(io.StringIO()):
            return work(world)

    found = ranks.run(size, quiet, 100)
    assert not any(one is None or isinstance(one, Exception) for one in found), found
    assert all(one == found[0] for one in found)
    return found[0]


def trained(size, recipe, *args, **more):
    """``[(layout, loss)]`` of each step of ``recipes/RECIPE.py`` on so many ranks."""
    return on_ranks(size, lambda world: load(world, recipe)["main"](*args, **more))


def compare(switched, plain, layouts):
    """Layouts in their order, losses to 1e-12, and something was learned."""
    assert list(dict.fromkeys(layout for layout, _ in switched)) == list(dict.fromkeys(layouts))
    assert [loss for _, loss in switched] == pytest.approx([loss for _, loss in plain], rel=0, abs=1e-12)
    assert plain[-1][1] < 0.9 * plain[0][1]
