"""Plans with files at one end, over layouts and cuts: every element once, and the judge sees what is planted."""

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.plans.cases import LAYERS, catalogues, layouts

from dynatrain.judge.shelves import judge_reads, judge_shelf
from dynatrain.plan.shelves import reads, written_pieces
from dynatrain.space.box import volume, whole
from dynatrain.space.ownership import declared

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def saved_by(catalogue, owner):
    """The boxes of a shelf that the ranks of ``owner`` have written, in no useful order."""
    found = {}
    for rank in reversed(range(owner.layout.world_size)):
        for granule, box in written_pieces(catalogue, owner, rank).items():
            found.setdefault(granule, []).append(box)
    for index, tensor in enumerate(catalogue):
        for number, state in enumerate(tensor.states):
            if not volume(whole(tensor.state_shape(state))):
                found[index, number] = []
    return found


@few
@given(catalogues(), layouts(), layouts())
def test_what_one_layout_wrote_another_reads_whole_and_once(catalogue, before, after):
    old, new = (declared(catalogue, layout, LAYERS) for layout in (before, after))
    boxes = saved_by(catalogue, old)
    assert judge_shelf(catalogue, boxes) == ()
    for rank in range(after.world_size):
        assert judge_reads(catalogue, boxes, new, rank, reads(catalogue, boxes, new, rank)) == ()


@few
@given(catalogues(), layouts(), layouts(), st.data())
def test_a_planted_fault_is_seen(catalogue, before, after, data):
    old, new = (declared(catalogue, layout, LAYERS) for layout in (before, after))
    boxes = saved_by(catalogue, old)
    rank = data.draw(st.sampled_from(range(after.world_size)))
    fetches = list(reads(catalogue, boxes, new, rank))
    assume(fetches)
    at = data.draw(st.sampled_from(range(len(fetches))))
    one = fetches[at]
    faults = [fetches[:at] + fetches[at + 1 :], [*fetches, one]]
    if one.box:
        (start, stop), *rest = one.box
        moved = replace(one, box=((start + 1, stop + 1), *rest))
        faults += [[*fetches[:at], moved, *fetches[at + 1 :]]]
    for fault in faults:
        assert judge_reads(catalogue, boxes, new, rank, fault)
    granule = one.granule
    for short in (boxes[granule][1:], boxes[granule] + boxes[granule][:1]):
        assert judge_shelf(catalogue, boxes | {granule: short})
