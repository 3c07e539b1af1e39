"""A layout that was prepared ahead: built, planned for and warm, until it is switched to or given up.

What is kept is the first half of a switch, the one that training does not wait for. It is that of one present layout
and of what is registered now: whatever changes either gives it up. Its memory counts as held, in every peak.
"""

from dataclasses import dataclass
from typing import Protocol

from dynatrain.layout.layout import Layout
from dynatrain.layout.text import print_layout
from dynatrain.train.attempt import Attempt
from dynatrain.train.order import Order
from dynatrain.train.world import World


class Told(Protocol):
    """Who writes down what is held."""

    def ready(self, layout: str, held: tuple[int, ...]) -> None:
        """From here on this is prepared; nothing where the text is empty."""


@dataclass(slots=True)
class Ready:
    """One rank's.

    Attributes:
        told: the recorder; None for none.
    """

    told: Told | None
    _attempt: Attempt | None = None

    @property
    def layout(self) -> str:
        """As text; empty where nothing is prepared."""
        return print_layout(self._attempt.target) if self._attempt else ""

    def keep(self, attempt: Attempt | None) -> str:
        """Keep what an attempt has prepared, where one has; gives what that holds, for people."""
        assert self._attempt is None
        if attempt is None:
            return "nothing is held for another layout"
        self._attempt, held = attempt, attempt.held
        attempt.party.hook("ready", -1, attempt.order.number)
        if self.told:
            self.told.ready(self.layout, held)
        most, together = max(held) / 1e6, sum(held) / 1e6
        return f"{self.layout} is ready and holds up to {most:,.1f} MB on a rank, {together:,.1f} MB in all"

    def take(self, order: Order, target: Layout | None, world: World) -> Attempt | None:
        """What an order goes on with; None where it was not prepared, and then nothing is any more.

        Args:
            order: that comes next.
            target: its layout; None for one that leads to none.
            world: the present one.
        """
        attempt = self._attempt
        if attempt is None:
            return None
        same = (target, order.mode, order.members, order.after) == (attempt.target, attempt.order.mode, (), 0)
        if not same or attempt.old is not world:
            self.give_up()
            return None
        self._attempt = None
        if self.told:
            self.told.ready("", ())
        attempt.go_on(order)
        return attempt

    def give_up(self) -> bool:
        """Free what is held, if anything is; whether there was something. On all ranks at one edge."""
        if self._attempt is None:
            return False
        attempt, self._attempt = self._attempt, None
        attempt.give_up()
        if self.told:
            self.told.ready("", ())
        return True
