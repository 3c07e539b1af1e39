"""What old and new ranks of a cold restart tell each other, in its folder. No torch here."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from dynatrain.space.decoder import DecoderShape
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

CHECKPOINT = "checkpoint"
"""Name of what the old ranks have saved, in the folder of a restart."""

_ORDER = "order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What new ranks are told by the old ones.

    Attributes:
        shape: of the model.
        layout: in which they begin.
        catalogue: all tensors.
        old: who held what.
        new: who is to hold what.
        digests: of what was held, by the cells of ``new``, of all ranks.
    """

    shape: DecoderShape
    layout: str
    catalogue: Catalogue
    old: Ownership
    new: Ownership
    digests: tuple[int, ...]

    def write(self, folder: Path) -> None:
        """Leave it in the folder of a restart."""
        (folder / _ORDER).write_bytes(pickle.dumps(self))

    @staticmethod
    def read(folder: Path) -> "Order":
        """What the old ranks have left."""
        found: Order = pickle.loads((folder / _ORDER).read_bytes())  # noqa: S301 - of this bench, in its own folder
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """How a new rank has begun; times are readings of the clock that all processes of a machine share.

    Attributes:
        imported: when it had imported torch and what it builds with.
        built: when it had a model and an optimizer, without state.
        ready: when it could train.
        peak_bytes: most resident bytes beyond those that it had without state.
        arrived: whether all ranks together hold what the old ones held.
    """

    imported: float
    built: float
    ready: float
    peak_bytes: int
    arrived: bool
