"""How the loop of one rank comes through losses: broken steps, their coupling, and what a step is to begin with."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from dynatrain.cluster.alarm import Alarm
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.mending import MendError, Mending, WorldLostError, release
from dynatrain.train.muster import Coupled
from dynatrain.train.party import Party
from dynatrain.train.streams import Streams
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.world import World

T = TypeVar("T")


class Survival:
    """One rank's; see the module's text, and :mod:`dynatrain.train.muster` for the rules.

    Args:
        party: this rank.

    Attributes:
        torn: whether the update of the step under way was begun and not ended.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._alarm: Alarm | None = party.worlds.alarm if party.worlds else None
        self._coupled: Coupled | None = None
        self._mending: Mending | None = None
        self._decided: Coupled | None = None
        self._begun: tuple[int, World] | None = None
        self._streams: Streams | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.torn = False

    def arm(self) -> None:
        """The loop begins: from here on losses are heard of."""
        if self._alarm is not None:
            self._alarm.arm(release)

    @property
    def on(self) -> bool:
        """Whether losses are heard of at all."""
        return self._alarm is not None

    @property
    def mending(self) -> Mending | None:
        """The way through the newest loss of this world; None while all its members are there."""
        loss = self._alarm.beyond(self._party.generation) if self._alarm else None
        if loss is not None and (self._mending is None or self._mending.loss.generation != loss.generation):
            self._mending = Mending(self._party, loss)
        return self._mending if loss is not None else None

    def broken_by(self, error: BaseException) -> bool:
        """Whether a loss is behind an error of the loop; waits for the news where a collective is broken."""
        if self._alarm is None or not isinstance(error, RuntimeError):
            return False
        if not (self._alarm.beyond(self._party.generation) or self._alarm.rings or _of_a_collective(error)):
            return False
        return self._wait(self._party.generation)

    def told(self) -> bool:
        """Whether members of this world are lost; waits until the agents must have told of it."""
        return self.on and self._wait(self._party.generation)

    def _wait(self, generation: int) -> bool:
        """Whether there is a loss beyond ``generation``; waits until the agents must have told of it."""
        assert self._alarm is not None
        return self._alarm.wait(generation, max(self._party.patience, self._alarm.notice)) is not None

    # The coupling.

    def coupled(self, step: int) -> bool:
        """Whether this rank is through the coupling of ``step``."""
        return self._coupled is not None and self._coupled[0] == step

    def couple(self, step: int, work: Callable[[], T]) -> T:
        """What ``work()`` gives, the coupling of a step; after a loss what it has given to another survivor.

        Raises:
            WorldLostError: a loss has broken it on all survivors.
        """
        try:
            result = work()
        except RuntimeError as error:
            if not self.broken_by(error):
                raise
            found = self.muster()
            if found is None or found[0] != step:
                assert self._mending is not None
                raise WorldLostError(f"{self._mending.loss.why}; step {step} comes again") from error
            result = found[1]
        self._coupled = step, result
        return result

    def couple_alone(self, step: int) -> None:
        """The coupling of a loop that has named none of its own."""
        if self._alarm is None or self._party.world_size == 1 or self.coupled(step):
            return

        def meet() -> None:
            dist.all_reduce(torch.ones(1, device=self._party.device))

        self.couple(step, meet)

    def muster(self) -> Coupled | None:
        """Hold the muster of the newest loss, once; what it has decided.

        Raises:
            MendError: a survivor did not come, and no loss is told that says why.
        """
        while (mending := self.mending) is not None and not mending.mustered:
            try:
                self._decided = mending.muster(self._coupled)
            except SwitchAbortedError as abort:
                self.await_next(mending, str(abort))
        return self._decided

    def await_next(self, mending: Mending, why: str) -> None:
        """Something has gone wrong on the way through a loss: return when there is another one.

        Raises:
            MendError: there is none.
        """
        if not self._wait(mending.loss.generation):
            raise MendError(f"{mending.loss.why}; and what is left cannot go on: {why}")

    # What a step begins with.

    def begin(self, step: int, world: World) -> None:
        """Note what a forward or a backward of ``step`` may write, for the case that it comes again."""
        self.torn = False
        if self._alarm is None:
            return
        self._begun = step, world
        self._streams = Streams.read(self._party.device)
        held = [local_tensor(entry.value) for entry in world.found.values() if entry.kind == "buffer"]
        self._buffers = [(buffer, buffer.clone()) for buffer in held]

    def take_back(self, step: int, world: World) -> None:
        """Put it back where the step that comes next is one that was broken off.

        Not into another world than it began in: that of a switch that was taken back, and its streams with it.
        """
        if self._begun is None or self._begun[0] != step or self._begun[1] is not world or self.torn:
            return
        assert self._streams is not None
        self._streams.restore(self._party.device)
        for buffer, before in self._buffers:
            buffer.copy_(before)


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether an error may be that of a process group: gloo's have no class of their own."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "pair closure"))
