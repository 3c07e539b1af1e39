"""A run for programs: what the commands ask of it, from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynatrain.app.ask import CODES, ask
from dynatrain.app.mistake import MistakeError
from dynatrain.app.runs import RunWorld, find_run
from dynatrain.observe.asked import NotDoneError
from dynatrain.observe.requests import Answer
from dynatrain.observe.run import RunFolder


class RunHandle:
    """Asks a running run for things and waits for each, from any process that sees its folder. No torch.

        run = dynatrain.RunHandle("runs/policy")
        run.lend(ranks=[4, 5, 6, 7])    # returns when their memory is back
        rollout()
        run.reclaim()

    Every method returns the run's answer, whose outcome is ``done`` or ``unchanged``.

    Args:
        run: its name or folder.
        timeout: seconds to wait for each answer; a request that was not taken by then never will be.

    Raises:
        RunError: there is no such run.
        NotDoneError: of every method: refused, aborted, or failed.
        MistakeError: likewise: the run is not running.
    """

    def __init__(self, run: str | Path, *, timeout: float = 300.0) -> None:
        self._run = str(find_run(str(run)).path)
        self.timeout = timeout

    @property
    def folder(self) -> RunFolder:
        """The run's."""
        return find_run(self._run)

    def switch(self, layout: str, *, mode: str = "") -> Answer:
        """Another layout for the same ranks."""
        return self._ask("switch", layout=layout, mode=mode)

    def prepare(self, layout: str, *, mode: str = "") -> Answer:
        """Prepare a layout ahead, so that a switch to it begins at once; the message says what that holds."""
        return self._ask("prepare", layout=layout, mode=mode)

    def scale(self, size: int, *, layout: str = "", mode: str = "") -> Answer:
        """Another number of ranks."""
        return self._ask("scale", size=size, layout=layout, mode=mode)

    def lend(self, *, ranks: Sequence[int] = (), count: int = 0, layout: str = "", mode: str = "") -> Answer:
        """Give ranks' places away, by their present numbers or so many of the highest; the message names them."""
        which = to_lend(RunWorld.of(self.folder), ranks, count)
        return self._ask("lend", **which, layout=layout, mode=mode)

    def reclaim(self, *, layout: str = "", mode: str = "") -> Answer:
        """Take all lent places back."""
        return self._ask("reclaim", layout=layout, mode=mode)

    def park(self) -> Answer:
        """Bring all state to host memory; training pauses."""
        return self._ask("park")

    def unpark(self) -> Answer:
        """Bring it back; training goes on."""
        return self._ask("unpark")

    def save(self) -> Answer:
        """Save beside training; the message is the checkpoint."""
        return self._ask("save")

    def stop(self) -> Answer:
        """End at the next step edge, saved where the run is saved."""
        return self._ask("stop")

    def _ask(self, verb: str, **arguments: Any) -> Answer:
        given = {name: value for name, value in arguments.items() if value}
        _, answer = ask(self.folder, verb, given, self.timeout)
        if CODES[answer.outcome]:
            raise NotDoneError(verb, answer)
        return answer


def to_lend(world: RunWorld, ranks: Sequence[int], count: int) -> dict[str, Any]:
    """Which ranks a request to lend is about.

    Args:
        world: the run's.
        ranks: by their present numbers; or
        count: so many of the highest.

    Raises:
        MistakeError: neither or both were said, there are no such ranks, or none would stay.
    """
    leave = sorted(set(ranks))
    if bool(leave) == bool(count):
        raise MistakeError("Which ranks? Some by their numbers, or a count of the highest: one of both.")
    if unknown := [one for one in leave if not 0 <= one < world.size]:
        raise MistakeError(f"There are no ranks {', '.join(map(str, unknown))}: the ranks are 0 .. {world.size - 1}.")
    if not 0 < (wanted := len(leave) or count) < world.size:
        raise MistakeError(f"{wanted} of {world.size} ranks cannot be lent; nearest: 1 to {world.size - 1}.")
    return {"leave": leave} if leave else {"size": world.size - count}
