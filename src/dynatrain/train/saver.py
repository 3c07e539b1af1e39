"""The saves of one job, one at a time: begun at a step edge, ended in the background."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynatrain.observe.checkpoints import checkpoint_name
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.publisher import Publisher
from dynatrain.train.saving import Saves, Saving
from dynatrain.train.world import World

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save has ended.

    Attributes:
        step: that was saved.
        outcome: ``done``, ``unchanged`` (it was there already) or ``failed``.
        message: the folder, or why not.
        order: who asked.
    """

    step: int
    outcome: str
    message: str
    order: Order | None


class SavingError(RuntimeError):
    """The job cannot be saved now; the text says what would do."""


class Saver:
    """Saves the worlds of one job.

    Args:
        party: this rank.
        saves: how; None where the job is never saved.
        ended: told of every save that has ended.
        publisher: publishes the job, beside training likewise.

    Attributes:
        publisher: likewise.
        last: how the last save has ended; None before the first.
        saved: the last step that was saved; -1 where none was.
    """

    def __init__(
        self, party: Party, saves: Saves | None, ended: Sequence[Callable[[Saved], None]], publisher: Publisher
    ) -> None:
        self._party = party
        self.publisher = publisher
        self._saves = saves
        self._ended = ended
        self._under_way: Saving | None = None
        self._order: Order | None = None
        self._number = 0
        self.last: Saved | None = None
        self.saved = -1

    @property
    def on(self) -> bool:
        """Whether the job is saved at all."""
        return self._saves is not None

    @property
    def root(self) -> Path | None:
        """Where its checkpoints are; None where it is never saved."""
        return self._saves.root if self._saves else None

    @property
    def every(self) -> int:
        """Steps between two saves; 0 for none by themselves."""
        return self._saves.every if self._saves else 0

    @property
    def busy(self) -> bool:
        """Whether a save is under way; to be asked after :meth:`look`."""
        return self._under_way is not None

    def holds_up(self, order: Order) -> bool:
        """Whether an order cannot begin yet for what is under way, which counts in the ranks' present numbers."""
        leaves = order.verb == "park" or bool(order.members)
        return (leaves and self.publisher.busy) or (self.busy and (leaves or order.verb == "save"))

    def require(self) -> None:
        """Refuse to save where there is no place to save to.

        Raises:
            SavingError: there is none.
        """
        if self._saves is None:
            raise SavingError("this job has no place to be saved to; give Switcher(saves=Saves(root=FOLDER))")

    def begin(self, world: World, step: int, order: Order | None) -> None:
        """Begin to save; on all ranks at the same edge, and not while one is under way."""
        assert self._saves is not None
        assert self._under_way is None
        folder = self._saves.root / checkpoint_name(step)
        self._order = order
        self._number += 1
        self._under_way = Saving(self._party, self._saves, world, step, folder, self._number)
        self._under_way.start()

    def save_now(self, world: World, step: int) -> str:
        """Save, while nothing is under way, and wait for it; what became of it, empty where the job is not saved."""
        if self._saves is None:
            return ""
        self.begin(world, step, None)
        self.finish()
        assert self.last is not None
        how = "not saved: " if self.last.outcome == "failed" else "saved in "
        return how + self.last.message

    def before_a_write(self) -> None:
        """Return when nothing that is about to be written is still to be copied."""
        if self._under_way is not None:
            self._under_way.wait_copied()
        self.publisher.before_a_write()

    def cross(self) -> None:
        """In another world saves are counted anew, as its newcomers know of none; none is under way then."""
        self._number = 0
        self.publisher.cross()

    def look(self) -> None:
        """Take note of a save that has ended."""
        if self._under_way is not None and self._under_way.done:
            self._note(self._under_way)

    def finish(self) -> None:
        """Wait for the save that is under way; the state may leave then."""
        self.publisher.before_a_write()
        if self._under_way is not None:
            assert self._saves is not None
            self._under_way.join(2 * self._saves.deadline)
            self._note(self._under_way)

    def give_up(self, why: str) -> None:
        """End what is under way: not all who take part in it are there any more."""
        self.publisher.give_up(why)
        if self._under_way is not None:
            self._under_way.give_up(why)
            self.finish()

    def _note(self, saving: Saving) -> None:
        assert self._saves is not None
        self._under_way = None
        problem = saving.problem if saving.done else "its thread does not end"
        outcome = "failed" if problem else "unchanged" if saving.unchanged else "done"
        message = problem or str(self._saves.root / checkpoint_name(saving.step))
        self._end(Saved(step=saving.step, outcome=outcome, message=message, order=self._order))

    def _end(self, saved: Saved) -> None:
        self.last = saved
        if saved.outcome != "failed":
            self.saved = saved.step
        elif self._party.rank == 0:
            _LOG.warning("step %d is not saved: %s", saved.step, saved.message)
        for told in self._ended:
            told(saved)
