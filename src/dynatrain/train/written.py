"""Whether what only an update is to write was written otherwise, between a step's edge and its ``optimizer.step()``.

What is copied or digested beside a step is of one moment because nothing writes it meanwhile. A loop may: weights of an
average that are put in for a validation, and taken out again. torch counts writes, each way in another place: what is
done with a DTensor on the DTensor, what is done with its local shard there, and what goes through ``.data``, or through
a ``foreach`` call on DTensors, nowhere. So a few elements of each parameter are looked at as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from dynatrain.execute.pieces import Pieces
from dynatrain.plan.plan import Granule
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.torch_private import local_tensor, times_written
from dynatrain.train.world import World

_SAMPLED = 8
"""Elements of a parameter that are looked at, evenly spread."""

REMEDY = (
    "validate on a copy of the model, or between optimizer.step() and the end of the step, and put back there what "
    "was written"
)
"""What a loop can do that writes."""


class StateWrittenError(SwitchAbortedError):
    """State was written while it was read as that of one moment; the text names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class _Noted:
    name: str
    handle: torch.Tensor
    piece: torch.Tensor
    writes: int
    sample: torch.Tensor | None

    def changed(self) -> bool:
        if _writes(self.handle) != self.writes:
            return True
        return self.sample is not None and not torch.equal(self.sample, _sample(self.piece))


class Watch:
    """Notes parameters and optimizer state as they are now.

    Args:
        world: theirs.
        pieces: of them, and of others, which are not watched.
        closely: optimizer state is noted, too, and elements of parameters, which takes some microseconds for each
            tensor; else torch's counts of the parameters alone, for where no time is to be lost.
    """

    def __init__(self, world: World, pieces: Pieces, *, closely: bool) -> None:
        self._noted: dict[Granule, _Noted] = {}
        handles = world.handles() if closely else {}
        for granule, piece in pieces.items():
            tensor = world.catalogue[granule[0]]
            state, where = tensor.states[granule[1]].name, world.where[tensor.name][0]
            own = state == "param"
            handle = world.found[where].value if own else handles.get((where, state))
            if handle is not None and state != "buffer":
                sample = _sample(piece.tensor) if own and closely else None
                self._noted[granule] = _Noted(f"{tensor.name} {state}", handle, piece.tensor, _writes(handle), sample)

    def require_unwritten(self, granule: Granule) -> None:
        """Refuse what was written since; what is not watched never was.

        Raises:
            StateWrittenError: by name.
        """
        noted = self._noted.get(granule)
        if noted is not None and noted.changed():
            raise StateWrittenError(
                f"{noted.name} was written between the step's edge and its optimizer.step(), while it was copied; "
                f"{REMEDY}"
            )

    def written(self) -> Iterator[str]:
        """What was written since, as ``tensor state``."""
        return (noted.name for noted in self._noted.values() if noted.changed())


def _writes(handle: torch.Tensor) -> int:
    own = times_written(handle)
    return own + times_written(local_tensor(handle)) if isinstance(handle, DTensor) else own


def _sample(piece: torch.Tensor) -> torch.Tensor:
    """The bits of some elements. A piece with gaps lies in a larger tensor of its kind, whose elements do as well."""
    number = min(_SAMPLED, piece.numel())
    stride = max(1, piece.numel() // _SAMPLED)
    return piece.as_strided((number,), (stride,)).clone().view(torch.uint8)
