"""What a loop may ask of its ``Switcher`` that begins at a later step edge."""

from dynatrain.train.argument import ArgumentError
from dynatrain.train.blueprint import check_mode
from dynatrain.train.course import Course
from dynatrain.train.party import Party
from dynatrain.train.targets import Read
from dynatrain.train.turns import Turns


class Asking:
    """A part of ``Switcher``.

    Attributes:
        step: the step under way, or the next one.
    """

    step: int
    _course: Course
    _party: Party
    _read: Read
    _turns: Turns

    def request(self, layout: str, *, mode: str = "", at: int = -1, after: int = 0, by: str = "program") -> None:
        """Ask for a layout, from the loop. All ranks may call; rank 0's word counts.

        Args:
            layout: the new one.
            mode: ``keep``, ``tight`` or ``auto``; by default the job's.
            at: first step that runs in it; -1 for as soon as all ranks are ready.
            after: micro-batches of that step that still run in the old layout: see :meth:`step_parts`.
            by: who asks.

        Raises:
            LayoutError: this job cannot have it.
            ArgumentError: there is no such mode, or no such place, or the step is not to come.
        """
        self._read(layout, self._party.world_size)
        check_mode(mode or "auto")
        if 0 <= at <= self.step:
            raise ArgumentError(f"at = {at}: step {self.step} is under way; nearest: {self.step + 1}, or -1 for soon")
        if after < 0:
            raise ArgumentError(f"after = {after}: a number of micro-batches; 0 switches at the step's edge")
        self._turns.ask(layout, mode=mode, at=at, after=after, by=by)

    def prepare(self, layout: str, *, mode: str = "", by: str = "program") -> None:
        """Ask, from the loop, that a layout be prepared ahead, beside training: a switch to it then begins at once.

        All ranks may call; rank 0's word counts. One is kept. What it holds counts as held, and is free again with the
        next switch, with :meth:`register`, when the job is parked, and when the present layout is prepared.

        Args:
            layout: what a switch is to lead to.
            mode: of that switch, as in :meth:`request`. In ``keep`` the new layout's memory is held; in ``tight`` some
                staging alone.
            by: who asks.

        Raises:
            LayoutError: this job cannot have it.
            ArgumentError: there is no such mode.
        """
        self._read(layout, self._party.world_size)
        check_mode(mode or "auto")
        self._turns.ask(layout, mode=mode, by=by, verb="prepare")

    @property
    def ready(self) -> str:
        """The layout that is prepared ahead, as text; empty where none is."""
        return self._course.ready.layout
