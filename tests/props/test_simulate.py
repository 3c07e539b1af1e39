"""What a simulation says of random changes: the bytes are the plan's, and nothing is faster than the floor."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.plans.cases import LAYERS, catalogues, layouts

from dynatrain.plan.build import whole_plan
from dynatrain.plan.by_family import family_plan
from dynatrain.plan.schedule import keep_schedule
from dynatrain.plan.storage import alike, storage
from dynatrain.plan.summary import summarise
from dynatrain.simulate.forecast import forecast
from dynatrain.simulate.machines import Machines
from dynatrain.space.ownership import declared, num_holders

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def machines(draw):
    rate = st.sampled_from([0.001, 0.01, 1.0])
    per_node, rails = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (8, 1)]))
    return Machines(
        ranks_per_node=per_node,
        rails=rails,
        nvlink_gb_s=draw(rate),
        nic_gb_s=draw(rate),
        pcie_gb_s=draw(st.sampled_from([0, 0.005])),
        fabric_gb_s=draw(st.sampled_from([0, 0.02])),
        node_nic_gb_s=draw(st.sampled_from([0, 0.005])),
        oversubscription=draw(st.sampled_from([1, 4])),
        copy_gb_s=draw(rate),
        message_us=draw(st.sampled_from([0, 5])),
        round_us=0,
    )


@few
@given(catalogues(), layouts(), layouts(), machines(), st.sampled_from([300, 1 << 30]))
def test_the_bytes_are_those_of_the_plan_and_no_plan_is_faster_than_the_floor(catalogue, before, after, cluster, each):
    old, new = (declared(catalogue, one, LAYERS) for one in (before, after))
    ranks, adoptable = num_holders(old, new), alike(catalogue, old, new)
    how = {"ranks_per_node": cluster.ranks_per_node, "adoptable": adoptable}
    schedule = keep_schedule(catalogue, each, (old, new))
    found = forecast(catalogue, family_plan(catalogue, old, new, schedule, **how), cluster, ranks)
    whole = whole_plan(catalogue, old, new, schedule, **how)
    summary = summarise(catalogue, old, new, whole, storage(catalogue, old, new, adoptable=adoptable))

    told = found.outcome.sent, found.outcome.received, found.outcome.relaid
    assert tuple(tuple(column.tolist()) for column in told) == (summary.bytes_out, summary.bytes_in, summary.relaid)
    assert found.outcome.seconds >= found.floor_seconds * (1 - 1e-9)
    if cluster.ranks_per_node == 1:
        moving = max(found.floor["receive"], found.floor["send"]) * cluster.far
        assert moving <= summary.floor_link
        assert ranks != before.world_size or moving > summary.floor_link - 1
