"""What users hang on blocks goes along where the axes are many: averages of experts, hooks on checkpointed blocks."""

import torch
from tests.dist.foreign import Shadow, whole
from tests.jobs import Books, Case, everywhere, switcher
from tests.shapes import QWEN3_MOE, experts_shape

from dynatrain.models.names import strip_wrappers
from dynatrain.train.trainer import Trainer

SHAPE = experts_shape(QWEN3_MOE, num_hidden_layers=1, num_key_value_heads=4)


def averages(sw):
    return {strip_wrappers(sw.model, name): whole(value) for name, value in sw.state["ema"].entries.items()}


def test_averages_of_experts_and_hooks_on_checkpointed_blocks_go_along():
    def work(world):
        case = Case(tour=("fsdp2.ep2", "tp2-sp.etp2"), size=2, shape=SHAPE, recompute="full", micro_batches=2)
        job, books, calls, seen = case.job(), Books(), [], []
        sw = switcher(job, world, case.tour[0], recorder=books)
        sw.register("ema", Shadow(sw.model, local=False))
        sw.model.layers["0"].register_forward_hook(lambda *_: calls.append(str(sw.layout.axes)))
        sw.request(case.tour[1], at=3)

        def after(result):
            if result.step != 3:
                sw.state["ema"].update(sw.model)
            if result.step in {2, 3}:
                seen.append(averages(sw))

        Trainer(job, case.data(), sw, after).run(5)
        return books.switches, seen, len(calls), len(set(calls))

    for switches, (before, after), calls, layouts in everywhere(2, work, seconds=100):
        assert [switch[:2] for switch in switches] == [("committed", "")]
        assert before.keys() == after.keys()
        assert "layers.0.mlp.experts.gate_proj" in before
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert calls >= 5
        assert layouts == 2
