"""A world that stands still between two steps, or between two parts of one: its pieces, ready to be moved."""

from typing import Any

from dynatrain.execute.pieces import Pieces
from dynatrain.layout.layout import Layout
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.equal import require_equal
from dynatrain.train.extra_state import check_extra_states, hear, speaks, tell
from dynatrain.train.gradients import agree_untouched, take
from dynatrain.train.install import check_carried, check_tensors, other_states, quiesce, refuse_pinned
from dynatrain.train.live import renew_buffers
from dynatrain.train.party import Party
from dynatrain.train.passage import Passage
from dynatrain.train.registered import common
from dynatrain.train.world import World


def facts_of(way: Passage, old: World, new: World) -> list[Any]:
    """What this rank tells all others before a move, beside that it stands still: see :func:`agree_on`.

    Raises:
        UnknownStateError: newcomers could not read some extra state; by name.
    """
    travels = max(old.layout.size("pp"), new.layout.size("pp")) > 1 or way.crossing is not None
    check_extra_states(old.owners, staged=travels)
    extra = tell(old.owners, new.owners, speaks=travels and speaks(old.layout, way.party.rank))
    return [common(old), extra, sorted(old.untouched)]


def agree_on(way: Passage, told: list[list[Any]], old: World, new: World) -> None:
    """Hold what must be equal on all ranks against what they have told, and take what the new modules need.

    Raises:
        SwitchAbortedError: something is not equal, or has nowhere to go, by name; on every rank alike.
    """
    require_equal([facts for facts, _, _ in way.of_old(told)])
    agree_untouched(old, [names for _, _, names in told])
    new.given = hear([extra for _, extra, _ in told], old.owners, new.owners, way.party.device)


def stand_still(party: Party, world: World, target: Layout, *, inside: bool, gives_up: bool) -> Pieces:
    """Nothing is gathered or pending any more, and what is there is what was planned.

    Args:
        party: this rank.
        world: that trains; mutated.
        target: the layout to come.
        inside: inside a step: accumulated gradients become pieces, too.
        gives_up: the pieces' memory will be given up (``tight``).

    Returns:
        This rank's pieces of all states.

    Raises:
        SwitchAbortedError: states are not those at the start, by name.
        UnknownStateError: something cannot be carried, by name.
    """
    check_carried(world, target)
    if inside:
        take(party, world)
    return at_rest(party, world, gives_up=gives_up)


def at_rest(party: Party, world: World, *, gives_up: bool) -> Pieces:
    """As :func:`stand_still`, of a world whose modules stay: whatever hangs on them stays, too."""
    quiesce(world)
    renew_buffers(world.parts, world.found)
    check_tensors(party, world)
    if changed := other_states(world, world.catalogue):
        raise SwitchAbortedError(f"the states of {', '.join(changed)} are not those at the start")
    pieces = world.pieces(party.rank, party.device)
    if gives_up:
        refuse_pinned(world, pieces)
    return pieces
