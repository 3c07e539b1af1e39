"""A world that stands still between two steps, or between two parts of one: its pieces, ready to be moved."""

from dynatrain.execute.pieces import Pieces
from dynatrain.layout.layout import Layout
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.gradients import take
from dynatrain.train.install import check_carried, check_tensors, other_states, quiesce, refuse_pinned
from dynatrain.train.party import Party
from dynatrain.train.world import World


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
    quiesce(world)
    check_tensors(party, world)
    if changed := other_states(world, world.catalogue):
        raise SwitchAbortedError(f"the states of {', '.join(changed)} are not those at the start")
    pieces = world.pieces(party.rank, party.device)
    if gives_up:
        refuse_pinned(world, pieces)
    return pieces
