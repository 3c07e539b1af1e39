"""A run whose members come and go is the run that one process would have made: same samples, same state, to 1e-12."""

from tests.crossings import Stop, case_of, expected, travel

LIMIT = 1e-12


def check(stops, found, losses):
    """What every member of a tour saw is the oracle's; nobody saw a step twice, and no step is missing."""
    assert all(isinstance(result, dict) for result in found), found
    told = {}
    for member, result in enumerate(found):
        first = next(number for number, stop in enumerate(stops) if member in stop.members)
        last = max(number for number, stop in enumerate(stops) if member in stop.members)
        assert sorted(set(result["generations"])) == list(range(first, last + 1)), (member, result)
        assert result["left"] == (last < len(stops) - 1)
        assert [switch[0] for switch in result["switches"]] == ["committed"] * (last - max(0, first - 1))
        assert all(switch[3] for switch in result["switches"]), result["switches"]
        numbers = [step[0] for step in result["steps"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for step, apart in zip(result["steps"], result["apart"], strict=True):
            assert abs(step[1] - losses[step[0]]) <= LIMIT
            assert max(apart.values()) <= LIMIT, (member, step[0], apart)
            assert told.setdefault(step[0], step[:5]) == step[:5]
    assert sorted(told) == list(range(len(told)))
    return told


def asked(found, step):
    """The samples of one step, as its ranks were given them."""
    return sorted({sample for result in found for one in result["steps"] if one[0] == step for sample in one[5]})


def test_members_come_and_go_and_the_run_is_the_oracles():
    stops = (
        Stop("fsdp2", (0, 1)),
        Stop("fsdp3", (0, 1, 2)),
        Stop("fsdp2", (0, 2)),
        Stop("tp2", (2, 3)),
    )
    case = case_of(40)
    losses, visits = expected(case)

    found = travel(case, stops, visits)

    told = check(stops, found, losses)
    assert all(asked(found, step) == sorted(one[4]) for step, one in told.items())
