"""A world that stands still between two steps, or between two parts of one: its pieces, ready to be moved."""

from typing import Any

from dynatrain.execute.pieces import Pieces
from dynatrain.layout.layout import Layout
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.equal import require_equal
from dynatrain.train.extra_state import check_extra_states, hear
from dynatrain.train.extra_state import tell as tell_extra
from dynatrain.train.gradients import agree_untouched, take
from dynatrain.train.install import check_carried, check_tensors, other_states, quiesce, refuse_pinned
from dynatrain.train.live import renew_buffers
from dynatrain.train.module_settings import settings_of
from dynatrain.train.optimizer_settings import optimizer_changes, require_movable
from dynatrain.train.party import Party
from dynatrain.train.passage import Passage
from dynatrain.train.registered import common
from dynatrain.train.settings import changes, not_shared, of_the_loop, require_portable, require_takers, tell
from dynatrain.train.settings import hear as agree_settings
from dynatrain.train.states import UnknownStateError
from dynatrain.train.world import World


def facts_of(way: Passage, old: World, new: World) -> list[Any]:
    """What this rank tells all others before a move, beside that it stands still: see :func:`agree_on`.

    Raises:
        UnknownStateError: newcomers could not read some extra state; by name.
    """
    travels = _travels(way, old, new)
    now = settings_of(old.parts, old.found, old.rule)
    changed = not_shared(changes(old.built, now), now, new.built)
    if old.layout.size("pp") > 1:
        changed = of_the_loop(changed)
    require_movable(old.built_optimizer, old.optimizer)
    changed |= optimizer_changes(old.built_optimizer, old.optimizer)
    new.changed = changed
    if late := [whose for whose, which in changed if which == "requires_grad" and old.gradients]:
        raise UnknownStateError(
            f"requires_grad of {', '.join(late)} was set since build, so that the next layout's gradients are others: "
            "switch at a step's edge (after=0)"
        )
    if travels:
        require_portable(changed)
    else:
        require_takers(changed, new.built | new.built_optimizer, travels=False)
    check_extra_states(old.owners, staged=travels)
    assert old.ownership is not None
    extra = tell_extra(old.owners, new.owners, speaks=travels and way.speaks(old.ownership))
    return [common(old), extra, sorted(old.untouched), tell(changed)]


def _travels(way: Passage, old: World, new: World) -> bool:
    """Whether modules may come to ranks that had not got them."""
    return max(old.layout.size("pp"), new.layout.size("pp")) > 1 or way.crossing is not None


def agree_on(way: Passage, told: list[list[Any]], old: World, new: World) -> None:
    """Hold what must be equal on all ranks against what they have told, and take what the new modules need.

    Raises:
        SwitchAbortedError: something is not equal, or has nowhere to go, by name; on every rank alike.
    """
    require_equal([facts for facts, *_ in way.of_old(told)])
    agree_untouched(old, [names for _, _, names, _ in told])
    new.given = hear([extra for _, extra, _, _ in told], old.owners, new.owners, way.party.device)
    settings = [of for *_, of in told]
    assert old.ownership is not None
    new.changed = agree_settings(settings, new.changed, old.catalogue, old.ownership, travels=_travels(way, old, new))


def _since(world: World, names: list[str]) -> str:
    """What to do, where these tensors have other states because they were frozen or freed since build."""
    built, found = world.built, {world.where[name][0]: world.found[world.where[name][0]].value for name in names}
    freed = [
        name
        for name, value in found.items()
        if built.get((f"parameter {name}", "requires_grad"), value.requires_grad) != value.requires_grad
    ]
    if not freed:
        return ""
    return (
        f": requires_grad of {', '.join(freed)} was set since build, and the optimizer has made state since. Let build "
        "train what is to be trained later and freeze it afterwards, so that its state is there from the start"
    )


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
        why = _since(world, changed)
        raise SwitchAbortedError(f"the states of {', '.join(changed)} are not those at the start{why}")
    pieces = world.pieces(party.rank, party.device)
    if gives_up:
        refuse_pinned(world, pieces)
    return pieces
