"""What the newcomers of a crossing are told before it begins: what was agreed, and what the job is that they join."""

import json
import time
from dataclasses import asdict, astuple, dataclass
from typing import Self

from dynatrain.cluster.board import Board
from dynatrain.cluster.crossing import Crossing
from dynatrain.cluster.worlds import forget_others
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.plan.record import placement_of, tensor_of
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.states import Form
from dynatrain.train.world import World

_KEY = "announcement"
_POLL_SECONDS = 0.02


class NotAdmittedError(RuntimeError):
    """A newcomer's crossing was given up: the run goes on without it, and this process is to end, with exit code 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """All that old rank 0 knows when it begins to prepare.

    Attributes:
        order: what was agreed.
        old: members of the old world, by rank.
        catalogue: all tensors of the job.
        ownership: who holds which box of them in the old world.
        forms: how registered objects keep each of their states.
        seconds: longest of the latest steps: ranks may be as far apart.
    """

    order: Order
    old: tuple[int, ...]
    catalogue: Catalogue
    ownership: Ownership
    forms: dict[str, Form]
    seconds: float

    @property
    def crossing(self) -> Crossing:
        """Who is who."""
        return Crossing(generation=self.order.generation, old=self.old, new=self.order.members)

    def put_up(self, board: Board) -> None:
        """Tell it, on the crossing's board."""
        told = {
            "order": asdict(self.order),
            "old": self.old,
            "layout": print_layout(self.ownership.layout),
            "tensors": [asdict(tensor) for tensor in self.catalogue],
            "placements": {name: asdict(placement) for name, placement in self.ownership.placements.items()},
            "forms": {state: astuple(form) for state, form in self.forms.items()},
            "seconds": self.seconds,
        }
        board.post(_KEY, json.dumps(told))

    @classmethod
    def wait(cls, board: Board, generation: int) -> Self:
        """Wait until it is put up; without an end, as the old ranks may be in a long step: an agent ends who waits.

        Raises:
            NotAdmittedError: the crossing into ``generation`` was given up.
        """
        while (text := board.peek(_KEY)) is None:
            if (go := board.go_edge(generation)) is not None:
                raise NotAdmittedError(f"world {generation} does not come to be: {go.reason}")
            time.sleep(_POLL_SECONDS)
        told = json.loads(text)
        placements = {name: placement_of(found) for name, found in told["placements"].items()}
        return cls(
            order=Order.read(told["order"]),
            old=tuple(told["old"]),
            catalogue=tuple(map(tensor_of, told["tensors"])),
            ownership=Ownership(parse_layout(told["layout"]), placements),
            forms={state: Form(label, tuple(inside), *more) for state, (label, inside, *more) in told["forms"].items()},
            seconds=told["seconds"],
        )


def announce(party: Party, order: Order, world: World, board: Board) -> None:
    """Old rank 0's word of a crossing out of ``world``, on its ``board``; what was left of earlier ones goes."""
    assert party.worlds is not None
    assert world.ownership is not None
    forget_others(party.worlds.run, party.generation, order.generation)
    Announcement(
        order=order,
        old=party.members,
        catalogue=world.catalogue,
        ownership=world.ownership,
        forms=world.forms,
        seconds=party.longest_step,
    ).put_up(board)
