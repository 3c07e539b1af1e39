"""Which of somebody's parameter groups is which of ours: told by the parameters in it, never by its place."""

from collections.abc import Collection, Mapping, Sequence


class ParamGroupError(ValueError):
    """Parameter groups that are not the same: every difference, by name."""


def merged(told: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The names in each group of the whole job, each once.

    Args:
        told: by rank, of each group.

    Raises:
        ParamGroupError: ranks with other groups, or another group for a parameter.
    """
    if len({len(of_rank) for of_rank in told}) > 1:
        counts = [len(of_rank) for of_rank in told]
        raise ParamGroupError(f"ranks have {counts} parameter groups; make the same groups on all, empty ones too")
    groups = [list(dict.fromkeys(name for names in of_group for name in names)) for of_group in zip(*told, strict=True)]
    first: dict[str, int] = {}
    twice = [
        f"{name} is in group {first[name]} on one rank and in group {number} on another"
        for number, names in enumerate(groups)
        for name in names
        if first.setdefault(name, number) != number
    ]
    if twice:
        raise ParamGroupError("; ".join(twice))
    return groups


def match(saved: Mapping[int, Collection[str]], here: Sequence[Collection[str]]) -> list[int]:
    """For each group here the number of the saved one that has the same parameters; empty ones go by their order.

    Args:
        saved: names by number, of the whole job.
        here: names in each group, of the whole job.

    Raises:
        ParamGroupError: a parameter is in no group there or here, or groups there and here cut across each other.
    """
    if len(saved) != len(here):
        raise ParamGroupError(f"it has {len(saved)} parameter groups, the optimizer here {len(here)}")
    group_of = {name: number for number, names in saved.items() for name in names}
    known = {name for names in here for name in names}
    problems = [f"none of its parameter groups has {name}" for names in here for name in names if name not in group_of]
    problems += [
        f"its parameter group {n} has {name}, which no group here has"
        for name, n in group_of.items()
        if name not in known
    ]
    empty = iter([number for number, names in saved.items() if not names])
    found = []
    for number, names in enumerate(here):
        of = sorted({group_of[name] for name in names if name in group_of})
        if len(of) > 1:
            one, other = (next(name for name in names if group_of.get(name) == at) for at in of[:2])
            problems.append(
                f"parameter group {number} here has {one}, of its group {of[0]}, and {other}, of its group {of[1]}"
            )
        found.append(of[0] if of else next(empty, -1) if not names else -1)
    for at in sorted({at for at in found if at >= 0 and found.count(at) > 1}):
        problems.append(f"its parameter group {at} is {found.count(at)} groups here")
    if not problems and -1 in found:
        problems.append(f"parameter group {found.index(-1)} here is empty, and none of its groups is")
    if problems:
        raise ParamGroupError("; ".join(problems) + ". Make the groups as they were saved; their order is free.")
    return found
