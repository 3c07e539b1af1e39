"""A job that went away and came back five times holds no more than a fresh one."""

import pytest
from benchmarks.round_trips import flat, measure, parse, summed

ALLOWED = 1.03


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_memory_descriptors_threads_and_groups_stay_where_they_were(mode):
    words = ["--ranks=2", "--from=fsdp2", "--to=tp2", "--sequence=32", "--steps=5", f"--mode={mode}"]
    trips, _, ends = measure(parse(words), tell=lambda _line: None)
    memory = {name: summed(ranks)["memory"] for name, ranks in ends.items()}

    assert len(trips) == 5
    assert all(flat(one) == flat(trips[1]) for one in trips[1:])
    assert memory["switched"] <= ALLOWED * memory["fresh"]
