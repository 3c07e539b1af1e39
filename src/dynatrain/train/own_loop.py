"""A loop of the user's own as the ranks of a run have it: under dynatrain's agent, which starts and ends them.

``loop = "train.py:main"`` in the run's configuration. The file is imported once, before ranks are forked from that
process; its function is called in each of them, also in those that come later::

    def main(run):
        sw = run.switcher(build, data_parallel="free")
        for step in sw.steps(until=run.steps):
            ...

Ranks that come begin at the step of their world; what they need to know of the steps before belongs to ``state``.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dynatrain.cluster.context import RankContext
from dynatrain.cluster.rank import Entry
from dynatrain.cluster.seat import Seat
from dynatrain.layout.text import print_layout
from dynatrain.observe.log import Log
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import CheckedRun
from dynatrain.train.rank import begin, recorder_of, require_saved, save_end, take_part
from dynatrain.train.switcher import Switcher
from dynatrain.train.world import Build


class LoopError(RuntimeError):
    """The user's loop does not do what a run needs of it."""


class LoopRun:
    """What a loop of the user's own is given: its run, as one rank of it sees it.

    Args:
        seat: the rank's.
        checked: the run.
        device: where the rank computes.

    Attributes:
        trained: what :meth:`switcher` made; None before.
    """

    def __init__(self, seat: Seat, checked: CheckedRun, device: torch.device) -> None:
        self._seat = seat
        self._checked = checked
        self.device = device
        self.trained: Switcher | None = None
        self._tell_agent: Callable[[int], None] = lambda _step: None

    @property
    def steps(self) -> int:
        """Steps of the whole run, as configured."""
        return self._checked.config.steps

    @property
    def folder(self) -> RunFolder:
        """The run's."""
        return self._seat.context.folder

    def switcher(self, build: Build, *, state: Mapping[str, Any] | None = None, **more: Any) -> Switcher:
        """The run's :class:`~dynatrain.train.switcher.Switcher`, loaded from its newest checkpoint where it has one.

        A newcomer waits in it for the others.

        Args:
            build: as of ``Switcher``.
            state: likewise.
            **more: likewise, but for what the run's configuration says (layout, mode, schedule, saving, and so on).

        Raises:
            LoopError: it was made before.
            NotAdmittedError: of a newcomer: its crossing was given up.
        """
        if self.trained is not None:
            raise LoopError("run.switcher was called before: a run under the agent has one job")
        recorder = recorder_of(self._seat, self.device)
        self.trained, progress = begin(self._seat, self._checked, self.device, recorder, build, state=state, **more)
        self._tell_agent = progress.step
        return self.trained

    def note(self, **values: Any) -> None:
        """Tell the agent the step, and write a line of kind ``loop`` to ``metrics.jsonl``: step, layout, these values.

        All ranks may call it; rank 0 writes.
        """
        sw = self.trained
        if sw is None:
            return
        self._tell_agent(sw.step)
        if sw.rank == 0:
            with Log(self.folder.metrics, generation=sw.generation, attempt=self._seat.context.attempt) as log:
                log.write("loop", step=sw.step, layout=print_layout(sw.layout), **values)


Loop = Callable[[LoopRun], object]


def entry(where: str) -> Entry:
    """What each rank runs; for the process from which they are forked.

    Args:
        where: ``FILE.py:FUNCTION``.

    Raises:
        LoopError: the file has no such function.
    """
    path, _, name = where.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))  # as Python does for a script
    module = Path(path).stem
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    loop = getattr(found, name, None)
    if not callable(loop):
        raise LoopError(f"{path} has no function {name}")
    return partial(main, loop)


def main(loop: Loop, context: RankContext) -> None:
    """The rank's entry function."""
    take_part(context, partial(_train, loop))


def _train(loop: Loop, seat: Seat, checked: CheckedRun, device: torch.device) -> Switcher:
    run = LoopRun(seat, checked, device)
    loop(run)
    if run.trained is None:
        raise LoopError(f"{checked.config.loop} has ended without run.switcher(build): nothing was trained")
    sw, made = run.trained, run.trained.step
    while True:
        save_end(sw, checked.config)
        if sw.left or sw.stopped or sw.meet():
            break
        if sw.step < made:
            raise LoopError(
                f"ranks were lost behind the loop, and of step {made} not everything is left, but of {sw.step}: start "
                "the run again, which goes on from its newest checkpoint"
            )
    require_saved(sw)
    return sw
