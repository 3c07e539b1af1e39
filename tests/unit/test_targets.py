import pytest

from dynatrain.layout.form import LayoutError
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.layout.untrained import untrained
from dynatrain.train.targets import whole_world


@pytest.mark.parametrize("text", ["fsdp2.cp2", "fsdp4.ep2", "fsdp2.tp2.etp2"])
def test_a_loop_is_not_sent_where_nothing_trains_yet(text):
    with pytest.raises(LayoutError, match="can be planned, but not trained in yet") as caught:
        whole_world(4)(text)

    assert len(caught.value.nearest) == 3
    for near in caught.value.nearest:
        layout = parse_layout(near)
        assert (layout.world_size, untrained(layout)) == (4, [])
        assert print_layout(whole_world(4)(near)) == near


def test_every_reason_is_told_at_once():
    with pytest.raises(LayoutError) as caught:
        whole_world(8)("fsdp2.cp2.ep2")

    assert len(caught.value.problems) == 3
