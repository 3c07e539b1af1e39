"""What the first step in a new layout writes before the switch is decided, as it was before that step."""

from collections.abc import Container
from dataclasses import dataclass, field

import torch

from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.plan.plan import Granule
from dynatrain.train.world import World


@dataclass(slots=True)
class BeforeStep:
    """Copies of some pieces' values.

    Attributes:
        old: the world whose catalogue numbers them.
        values: by granule.
    """

    old: World
    values: dict[Granule, torch.Tensor] = field(default_factory=dict)

    def keep_buffers(self, pieces: Pieces) -> None:
        """Before the step: its forward writes buffers."""
        self._keep(pieces, {"buffer"})

    def keep_objects(self, pieces: Pieces) -> None:
        """Before the rest of a doomed step: it goes on to write registered objects."""
        self._keep(pieces, self.old.objects.keys())

    def under(self, pieces: Pieces) -> Pieces:
        """``pieces`` with the values that were kept."""
        return pieces | {granule: Piece(tensor, pieces[granule].box) for granule, tensor in self.values.items()}

    def _keep(self, pieces: Pieces, labels: Container[str]) -> None:
        for granule, piece in pieces.items():
            state = self.old.catalogue[granule[0]].states[granule[1]].name
            if state.partition(".")[0] in labels:
                self.values[granule] = piece.tensor.clone()
