"""Blocks that are compiled train as they do without, and a layout that comes again finds its code."""

import pytest
from tests.dist.test_same_numbers import furthest
from tests.jobs import Books, Case, everywhere, switcher
from tests.shapes import latent_shape, small_shape
from torch._dynamo.utils import counters

from dynatrain.train.trainer import Trainer

PLAIN = small_shape(dropout=0.0)
TOUR = ("fsdp2", "dp2", "fsdp2", "tp2", "dp2")


class Seconds(Books):
    """Keeps how long each switch's first step compiled."""

    def __init__(self):
        super().__init__()
        self.compiling = []

    def ended(self, attempt, *rest):
        super().ended(attempt, *rest)
        self.compiling.append(attempt.seconds["compile"])


def test_a_layout_that_comes_again_compiles_nothing_and_the_numbers_are_those_without():
    def work(world):
        found = {}
        for backend in ("", "aot_eager"):
            case = Case(tour=TOUR, size=2, steps_each=3, shape=PLAIN, compile_with=backend, micro_batches=2)
            books, losses, graphs, wrapped = Seconds(), [], [], []
            sw = switcher(case.job(), world, TOUR[0], recorder=books)
            for number, layout in enumerate(TOUR[1:], 1):
                sw.request(layout, at=number * case.steps_each)

            def after(result, sw=sw, losses=losses, graphs=graphs, wrapped=wrapped):
                losses.append(result.loss)
                graphs.append(counters["stats"]["unique_graphs"])
                wrapped.append(hasattr(sw.model.layers["0"], "_orig_mod"))

            Trainer(case.job(), case.data(), sw, after).run(case.steps)
            found[backend] = losses, graphs, wrapped, books.compiling, books.switches
            sw.close()
        return found

    for found in everywhere(2, work, seconds=200):
        losses, graphs, wrapped, compiling, switches = found["aot_eager"]
        assert [switch[0] for switch in switches] == ["committed"] * 4
        assert losses == pytest.approx(found[""][0], rel=0, abs=1e-12)
        assert graphs[0] > 0
        assert len(set(graphs)) == 1, "layouts of equal shapes have one code"
        assert wrapped == [True] * 9 + [False] * 3 + [True] * 3, "blocks with tp stay eager"
        assert compiling == [0.0] * 4
        assert found[""][1][-1] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_are_the_oracles_under_every_other_axis(backend):
    experts = latent_shape(router_aux_loss_coef=0.1)
    for shape, tour, recompute in (
        (small_shape(), ("fsdp2", "pp2", "cp2-ring"), "full"),
        (experts, ("fsdp2.ep2", "dp2", "cp2"), "none"),
        (small_shape(num_hidden_layers=4), ("pp2v2", "pp2-zb", "pp2v2-zbv"), "full"),
    ):
        case = Case(tour=tour, size=2, shape=shape, steps_each=2, compile_with=backend, recompute=recompute)
        assert max(furthest(case)) <= 1e-12
