"""A world that stands still between two steps, or between two parts of one: its pieces, ready to be moved."""

from collections.abc import Sequence
from typing import Any

from dynatrain.execute.pieces import Pieces
from dynatrain.layout.layout import Layout
from dynatrain.train import registered
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.extra_state import all_extra_states, extra_states, told_extra_states
from dynatrain.train.gradients import agree_untouched, take
from dynatrain.train.install import check_carried, check_tensors, quiesce, refuse_pinned
from dynatrain.train.party import Party
from dynatrain.train.world import World

Facts = tuple[registered.Facts, dict[str, str], list[str]]
"""Hashes of what must be equal, extra state of this rank's stage, names of gradients that nothing has touched yet."""


def stand_still(party: Party, world: World, target: Layout, *, inside: bool, gives_up: bool) -> tuple[Pieces, Facts]:
    """Nothing is gathered or pending any more, and what is there is what was planned.

    Args:
        party: this rank.
        world: that trains; mutated.
        target: the layout to come.
        inside: inside a step: accumulated gradients become pieces, too.
        gives_up: the pieces' memory will be given up (``tight``).

    Returns:
        This rank's pieces of all states, and what all ranks are to be told: see :func:`hear`.

    Raises:
        SwitchAbortedError: states are not those at the start, by name.
        UnknownStateError: something cannot be carried, by name.
    """
    check_carried(world, target)
    if inside:
        take(party, world)
    quiesce(world)
    check_tensors(party, world)
    now, planned = world.states(), {tensor.name: tensor.states for tensor in world.catalogue}
    if changed := sorted(name for name, (entry, _) in world.where.items() if planned[name] != now[entry]):
        raise SwitchAbortedError(f"the states of {', '.join(changed)} are not those at the start")
    pieces = world.pieces(party.rank, party.device)
    if gives_up:
        refuse_pinned(world, pieces)
    texts = told_extra_states(extra_states(world.parts), world.layout, party.rank)
    return pieces, (registered.common(world), texts, sorted(world.untouched))


def hear(world: World, told: Sequence[Facts]) -> dict[str, Any]:
    """The extra state of all modules, from what all ranks have told; ranks must agree on what they share.

    Raises:
        SwitchAbortedError: they do not, by name; on every rank alike.
    """
    hashes, texts, untouched = zip(*told, strict=True)
    registered.require_common(hashes)
    agree_untouched(world, untouched)
    return all_extra_states(extra_states(world.parts), texts)
