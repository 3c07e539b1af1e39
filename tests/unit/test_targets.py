import pytest

from dynatrain.layout.form import LayoutError
from dynatrain.layout.text import print_layout
from dynatrain.train.targets import whole_world


@pytest.mark.parametrize("text", ["fsdp2.cp2", "fsdp4.ep2", "pp2v2.dp2", "pp2-zb.fsdp2-z2", "fsdp2.tp2.etp2"])
def test_a_loop_is_not_sent_where_no_build_can_be_relied_on(text):
    with pytest.raises(LayoutError, match="needs a build that knows it") as caught:
        whole_world(text, 4)

    assert len(caught.value.nearest) == 3
    for near in caught.value.nearest:
        assert print_layout(whole_world(near, 4)) == near


def test_every_reason_is_told_at_once():
    with pytest.raises(LayoutError) as caught:
        whole_world("fsdp2.cp2.ep2", 8)

    assert len(caught.value.problems) == 3
