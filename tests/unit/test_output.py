"""Numbers as people read them."""

import pytest

from dynatrain.app.output import seconds, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (27546012, "27.5 MB"), (999_999, "1 MB"), (None, "-")],
)
def test_bytes_have_three_digits_and_a_unit(count, text):
    assert size(count) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (125, "2:05 min")])
def test_seconds_have_a_unit_that_fits(value, text):
    assert seconds(value) == text
