"""How a loop lends ranks of its run to another program, an engine's for example, and takes them back."""

from collections.abc import Mapping, Sequence
from typing import Any

from dynatrain.config.run import STEPS_BETWEEN
from dynatrain.observe.asked import Asked
from dynatrain.observe.requests import Request, submit
from dynatrain.train.argument import ArgumentError
from dynatrain.train.party import Party
from dynatrain.train.turns import Turns


class Lends:
    """What a ``Switcher`` under dynatrain's agent asks that agent for."""

    _party: Party
    _turns: Turns
    step: int

    def lend(self, *, ranks: Sequence[int] = (), count: int = 0, layout: str = "", at: int) -> Asked:
        """Give ranks' places to another program from a step on. All ranks call it, in one step; it returns at once.

        Their loops end before that step, ``left`` is true there, and their processes end. The others go on in a world
        without them, and nobody else of the run takes the places.

        Args:
            ranks: which, by their present numbers; or
            count: so many of the highest.
            layout: of those that stay, as text; by default the nearest to the present one.
            at: first step without them, three steps ahead or more.

        Returns:
            What may be waited for behind that edge: then the processes are gone, and their memory is free.

        Raises:
            ArgumentError: no agent starts and ends this loop's ranks; there are no such ranks, or none would stay; or
                the step is too near.
        """
        size, leave = self._party.world_size, sorted(set(ranks))
        left = size - (len(leave) or count)
        if bool(leave) == bool(count) or not 0 < left < size or not set(leave) <= set(range(size)):
            raise ArgumentError(
                f"ranks = {list(ranks)}, count = {count}: one of both, of ranks 0 to {size - 1}, of which one stays"
            )
        which: dict[str, Any] = {"leave": leave} if leave else {"size": left}
        return self._ask("lend", which | ({"layout": layout} if layout else {}), at)

    def reclaim(self, *, layout: str = "", at: int) -> Asked:
        """Take all lent places back, with new ranks on them from a step on; as :meth:`lend`.

        The newcomers start beside the steps until then, and run the loop from that step. The other program has to have
        left the memory by then.

        Args:
            layout: of the larger world; by default the one from before.
            at: first step with them, three steps ahead or more.
        """
        return self._ask("reclaim", {"layout": layout} if layout else {}, at)

    def _ask(self, verb: str, arguments: Mapping[str, Any], at: int) -> Asked:
        worlds = self._party.worlds
        if worlds is None or worlds.folder is None:
            raise ArgumentError(
                f"{verb}: no agent of dynatrain starts and ends the ranks of this loop; see docs/workers.md"
            )
        if at < self.step + STEPS_BETWEEN:
            raise ArgumentError(f"at = {at}: step {self.step} is under way; nearest: {self.step + STEPS_BETWEEN}")
        # Of all ranks one and the same request, whoever writes it first.
        told = f"loop-{worlds.attempt}-{self._party.generation}-{self.step}-{verb}"
        asked = Asked(worlds.folder.requests, told, verb)
        submit(asked.folder, Request(id=told, verb=verb, arguments={**arguments, "at": at}, by="program"))
        self._turns.expect(told, at, lambda: asked.answer() is not None)
        return asked
