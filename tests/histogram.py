"""What random switches reach, counted over the cases that a sweep draws: a kind of case that it misses is named."""

import itertools
from collections import Counter

from dynatrain.layout.layout import AXES, EXPERT_AXES
from dynatrain.space.optimizers import OPTIMIZERS

ALL = (*AXES, *EXPERT_AXES)
LEAST = (
    {f"{axis} over 1": 0.10 for axis in ALL}
    | {f"from {one} to {other}": 0.01 for one, other in itertools.permutations(ALL, 2)}
    | {f"{name}'s state": 0.05 for name in OPTIMIZERS}
    | {"uneven dims": 0.20, "etp other than tp": 0.03}
    | {"several optimizers": 0.02, "dense": 0.05, "experts": 0.05, "tied": 0.05, "not tied": 0.05}
    | dict.fromkeys(("chunks", "V", "copied heads", "ring", "ulysses"), 0.02)
)
"""The least share of the cases that each kind has. ``from cp to ep``: cp shrinks in the switch, and ep grows."""


def kinds(of, before, after):
    """The kinds of case that a switch of a toy is."""
    both = (before, after)
    found = {f"{axis} over 1" for axis in ALL if any(one.size(axis) > 1 for one in both)}
    grown = [axis for axis in ALL if after.size(axis) > before.size(axis)]
    shrunk = [axis for axis in ALL if after.size(axis) < before.size(axis)]
    found |= {f"from {one} to {other}" for one in shrunk for other in grown}
    found |= {f"{name}'s state" for name in (of.optimizer, of.rest)}
    found |= {"experts" if of.experts else "dense", "tied" if of.tied else "not tied"}
    found |= {one.cp_method for one in both}
    flags = {
        "uneven dims": any(size % one.ways("fsdp") for one in both for size in (of.vocabulary, of.width)),
        "etp other than tp": any(one.ep > 1 and one.etp != one.size("tp") for one in both),
        "several optimizers": of.optimizer != of.rest,
        "chunks": any(one.chunks > 1 for one in both),
        "V": any(one.schedule == "zbv" for one in both),
        "copied heads": any(one.size("tp") > of.kv_heads for one in both),
    }
    return found | {name for name, there in flags.items() if there}


def lacking(cases):
    """Every kind that has a lesser share of ``cases``, each ``(toy, layout before, layout after)``, than it must."""
    cases = list(cases)
    seen = Counter(kind for case in cases for kind in kinds(*case))
    return [
        f"{kind}: in {seen[kind]} of {len(cases)} cases; at least {least:.0%}"
        for kind, least in LEAST.items()
        if seen[kind] < least * len(cases)
    ]
