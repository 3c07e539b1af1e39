import pytest

from dynatrain.observe.versions import VersionError, environment, require_tested, versions


def test_the_tested_versions_are_the_installed_ones():
    require_tested(versions())


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"python": "3.12.1", "torch": "2.13.0+cpu"}, ["python 3.11", "3.12.1"]),
        ({"python": "3.11.7", "torch": "2.14.0"}, ["torch 2.13", "2.14.0"]),
        ({"python": "3.11.7", "torch": "2.130.0"}, ["torch 2.13", "2.130.0"]),
        ({"python": "3.11.7", "torch": ""}, ["torch 2.13", "not installed"]),
        ({"python": "3.10.0", "torch": "2.9.1"}, ["3.10.0", "2.9.1"]),
    ],
)
def test_other_versions_are_refused_by_name(found, named):
    with pytest.raises(VersionError) as refusal:
        require_tested(found)
    assert all(text in str(refusal.value) for text in named)


def test_the_environment_of_a_run_names_versions_and_machine():
    found = environment()
    assert found["versions"] == versions()
    assert found["memory_bytes"] > 1 << 20
