"""Whole states from the pieces of all ranks, as bytes: what a switch must leave as it was."""

import numpy as np


def pasted(ranks):
    """``{(tensor, state): bytes of its elements}`` from each rank's ``{(tensor, state): (box, array)}``.

    Raises:
        AssertionError: copies that differ in a bit, and elements that nobody holds; by name.
    """
    sizes = {}
    for pieces in ranks:
        for key, (box, _) in pieces.items():
            ends = [stop for _, stop in box]
            sizes[key] = tuple(map(max, zip(ends, sizes.get(key, ends), strict=True)))
    found, written = {}, {}
    for pieces in ranks:
        for key, (box, array) in pieces.items():
            raw = np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8)
            whole = found.setdefault(key, np.zeros((*sizes[key], raw.shape[-1]), np.uint8))
            seen = written.setdefault(key, np.zeros(sizes[key], bool))
            where = tuple(slice(*ends) for ends in box)
            again = seen[where]
            assert np.array_equal(whole[where][again], raw[again]), f"copies of {key} differ"
            whole[where], seen[where] = raw, True
    assert all(seen.all() for seen in written.values()), [key for key, seen in written.items() if not seen.all()]
    return found


def same(one, other):
    """The keys under which two dicts of :func:`pasted` differ."""
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in one or key not in other or not np.array_equal(one[key], other[key])
    ]
