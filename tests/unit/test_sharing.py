"""How a global batch is cut into micro-batches, also where there are not enough samples for a whole one."""

import numpy as np
import pytest

from dynatrain.data.samples import Samples
from dynatrain.layout.text import parse_layout
from dynatrain.train.step import FILLER, IGNORED, Sharing

SHARING = Sharing(global_sequences=8, micro_sequences=2)
DATA = Samples(tokens=np.arange(100, dtype=np.uint16), sequence=3)


@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp3", "fsdp4", "pp2.dp2.tp2"])
@pytest.mark.parametrize("size", [8, 5, 1])
def test_every_target_of_every_sample_counts_once_and_no_other(layout, size):
    layout = parse_layout(layout)
    ids = np.arange(20, 20 + size)
    counted, shapes = [], set()
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if at.pp == at.tp == 0:
            batches, targets = SHARING.micro_batches(DATA, ids, layout, at, "cpu")
            assert targets == 3 * size
            shapes.add((len(batches), *(tuple(batch.inputs.shape) for batch in batches)))
            for batch in batches:
                real = batch.targets != IGNORED
                assert (real.all(1) == real.any(1)).all()
                assert (batch.targets == batch.inputs + 1)[real].all()
                assert (batch.samples * 3 == batch.inputs[:, 0])[real.any(1)].all()
                assert (batch.samples[~real.any(1)] == FILLER).all()
                assert batch.index >= 0 or not real.any()
                counted += batch.samples[real.any(1)].tolist()
    assert sorted(counted) == ids.tolist()
    assert len(shapes) == 1  # every rank takes part in the same collectives


@pytest.mark.parametrize(("first", "second"), [("dp2", "fsdp4"), ("pp2.dp2", "tp2"), ("dp3", "pp2")])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_two_parts_of_a_step_deal_out_every_micro_batch_once_whatever_their_layouts(first, second, after):
    dealt = []
    for text, part in ((first, range(after)), (second, range(after, 4))):
        layout, lengths = parse_layout(text), set()
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            if at.pp == at.tp == 0:
                batches, targets = SHARING.micro_batches(DATA, np.arange(8), layout, at, "cpu", part)
                assert targets == 3 * 8  # of the whole step, by which losses are divided
                dealt += [batch.index for batch in batches if batch.index >= 0]
                lengths.add(len(batches))
        assert len(lengths) == 1
        assert lengths.pop() >= layout.size("pp")
    assert sorted(dealt) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "schedule", "taken"),
    [("pp2v2", "1f1b", 6), ("pp2-zb", "gpipe", 6), ("pp2v2-zbv", "1f1b", 5), ("pp2", "1f1b", 5), ("pp2v2", "gpipe", 5)],
)
def test_a_part_of_a_step_is_filled_up_to_what_the_pipeline_takes(text, schedule, taken):
    """Five micro-batches make no equal rounds of two or more; the whole step's eight do."""
    sharing, layout = Sharing(global_sequences=8, micro_sequences=1, schedule=schedule), parse_layout(text)
    batches, _ = sharing.micro_batches(DATA, np.arange(8), layout, layout.coordinates(0), "cpu", range(3, 8))

    assert [batch.index for batch in batches] == [3, 4, 5, 6, 7, -1][:taken]
