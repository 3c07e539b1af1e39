"""What a loop asks its ``Switcher`` for in every step: the handles of the present layout, and where the job stands."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynatrain.layout.layout import Layout
from dynatrain.train.course import Course
from dynatrain.train.parking import Parking
from dynatrain.train.party import Party
from dynatrain.train.saver import Saver
from dynatrain.train.world import World


class Handles:
    """Read from the course of a job; changes nothing."""

    _course: Course
    _party: Party
    _saver: Saver
    _parking: Parking
    _inside: bool
    step: int

    @property
    def model(self) -> Any:
        """This rank's module in the present layout (a list where ``build`` returned several)."""
        return self.world.parts[0] if len(self.world.parts) == 1 else self.world.parts

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's modules in the present layout."""
        return self.world.parts

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the present layout."""
        return self.world.optimizer

    @property
    def state(self) -> Mapping[str, Any]:
        """The registered objects; factories' products are those of the present layout."""
        return self.world.objects

    @property
    def doomed(self) -> bool:
        """Whether the step under way is taken back: it updates nothing, and comes again in the old layout."""
        return bool(self._course.doomed)

    @property
    def stopped(self) -> bool:
        """Whether the job was asked to stop, and has."""
        return self._course.stopped

    @property
    def left(self) -> bool:
        """Whether the run goes on without this rank, whose process is to end with code 0 and waits for nobody."""
        return self._course.left

    @property
    def rank(self) -> int:
        """This rank's number in the present world."""
        return self._party.rank

    @property
    def generation(self) -> int:
        """Number of the present world: one more at each change of members that was tried."""
        return self._party.generation

    @property
    def layout(self) -> Layout:
        """The present layout."""
        return self.world.layout

    @property
    def world(self) -> World:
        """All that the present layout has bound."""
        return self._course.world

    @property
    def saved(self) -> int:
        """The last step that was saved; -1 where none was."""
        return self._saver.saved

    @property
    def unsaved(self) -> str:
        """Why the present step could not be saved; empty where it was, or nobody tried."""
        last = self._saver.last
        return last.message if last and (last.step, last.outcome) == (self.step, "failed") else ""

    @property
    def parked(self) -> bool:
        """Whether the state is in host memory."""
        return self._parking.parked

    @property
    def _next_step(self) -> int:
        return self.step + (self._inside and self._course.updated)
