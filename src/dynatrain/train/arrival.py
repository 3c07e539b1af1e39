"""A newcomer's way in: it waits to be told of its crossing, then builds its world as any rank does its first one."""

from dataclasses import dataclass

from dynatrain.layout.layout import Layout
from dynatrain.train.agreement import words_of
from dynatrain.train.announcement import Announcement, NotAdmittedError
from dynatrain.train.attempt import Attempt
from dynatrain.train.party import Party
from dynatrain.train.passage import Passage, arrival
from dynatrain.train.world import World, nothing


@dataclass(slots=True, kw_only=True)
class Arrival:
    """One newcomer's.

    Attributes:
        told: what the run is.
        way: through the crossing.
    """

    told: Announcement
    way: Passage

    def attempt(self, world: World, target: Layout) -> Attempt:
        """The crossing as this newcomer takes part in it, with the world that it has built."""
        old = nothing(self.told.ownership.layout, world.mesh)
        old.catalogue, old.ownership, old.forms = self.told.catalogue, self.told.ownership, self.told.forms
        world.forms = self.told.forms
        return Attempt(way=self.way, order=self.told.order, target=target, old=old, new=world)

    def fail(self, error: Exception) -> None:
        """Tell the others that this newcomer does not come.

        Raises:
            NotAdmittedError: they had given up before: what failed here had waited for them.
        """
        why = f"newcomer {self.way.standing.member}: {words_of(error)}"
        if (reason := self.way.give_up(why)) != why:
            raise NotAdmittedError(reason) from error


def arrive(party: Party) -> Arrival:
    """Wait to be told, and become a rank of the world to come: the default group is that world's from here on.

    Args:
        party: in the world to come.

    Raises:
        NotAdmittedError: the crossing was given up.
    """
    assert party.worlds is not None
    generation = party.generation
    told = Announcement.wait(party.worlds.crossing(generation, 0), generation)
    party.members = told.order.members
    party.note_step(told.seconds)
    way = arrival(party, told.crossing, told.order)
    found = Arrival(told=told, way=way)
    try:
        way.settle()
    except Exception as error:
        found.fail(error)
        raise
    return found
