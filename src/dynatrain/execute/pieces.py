"""What a rank holds, and the memory that it lies in."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dynatrain.execute.pages import discard, mapped_apart, prefer_huge
from dynatrain.execute.promise import Promise
from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box, shape_of
from dynatrain.space.tensor import Catalogue

_POISON_BYTE = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What a rank holds of one granule.

    Attributes:
        tensor: detached, exactly the shape of ``box``; alone in its storage, which may be longer than it, and
            contiguous; or beside the other segments of a fused tensor, and strided where they lie along another dim
            than the first.
        box: in the coordinates of the granule; ``()`` for a scalar state.
        nbytes: size of the storage, padding included, while it is not given back.
    """

    tensor: torch.Tensor
    box: Box
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.tensor.untyped_storage().nbytes())

    @property
    def pinned(self) -> bool:
        """Whether its memory cannot be given up while somebody refers to it: numpy or another process shares it."""
        return not self.storage.resizable()

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage, one object for all tensors that alias it."""
        return self.tensor.untyped_storage()


Pieces = dict[Granule, Piece]
"""All that one rank holds under one ownership, empty pieces included."""


def misfits(pieces: Mapping[Granule, Piece], catalogue: Catalogue) -> list[str]:
    """Every reason why ``pieces`` cannot be what its type says, one sentence each."""
    found = []
    seen: dict[int, tuple[str, str]] = {}
    for (tensor, state), piece in sorted(pieces.items(), key=lambda pair: pair[0]):
        declared = catalogue[tensor].states[state]
        name = f"{catalogue[tensor].name} {declared.name}"
        if tuple(piece.tensor.shape) != shape_of(piece.box):
            found.append(f"{name}: shape {tuple(piece.tensor.shape)} is not that of its box {piece.box}")
        if str(piece.tensor.dtype) != f"torch.{declared.dtype}":
            found.append(f"{name}: dtype {piece.tensor.dtype}, the catalogue says {declared.dtype}")
        if piece.tensor.requires_grad or not (piece.tensor.is_contiguous() or catalogue[tensor].within):
            found.append(f"{name}: must be contiguous, unless it lies in a fused tensor, and detached")
        storage = f"{catalogue[tensor].within or catalogue[tensor].name} {declared.name}"
        held, other = seen.setdefault(piece.storage.data_ptr(), (storage, name))
        if piece.nbytes and held != storage:
            found.append(f"{name}: shares its storage with {other}, so neither can be given up alone")
    return found


class Pool:
    """Gives out, takes back and counts the memory of pieces and staging buffers of one rank.

    Args:
        device: where memory is allocated.
        poison: fill new memory with NaN (integers: bytes 0x7F), so that an element that nobody wrote is visible.
        promise: a bound that other jobs of this process share; None for none.

    Attributes:
        promise: likewise.
        held: bytes now in use.
        peak: most bytes ever in use at once; a caller may set it back to ``held``.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, poison: bool = False, promise: Promise | None = None
    ) -> None:
        self.device = torch.device(device)
        self.promise = promise
        self.held = 0
        self.peak = 0
        self._poison = poison

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, storage_bytes: int = 0) -> torch.Tensor:
        """A contiguous tensor at the start of a storage of its own.

        Its content is undefined; padding behind it is zero.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            storage_bytes: size of the storage where it is to be longer than the tensor.

        Raises:
            PromiseError: the jobs of this process would hold more than was promised.
        """
        nbytes = max(storage_bytes, torch.Size(shape).numel() * dtype.itemsize)
        with self._counted(nbytes), mapped_apart():
            storage = torch.UntypedStorage(nbytes, device=self.device)
        tensor = torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, shape)
        self._prepare(tensor)
        return tensor

    def hold(self, pieces: Iterable[Piece]) -> None:
        """Count pieces that were allocated elsewhere and are in use now; what lies in one storage, once.

        Raises:
            PromiseError: the jobs of this process hold more than was promised; nothing was counted.
        """
        self._count(sum({piece.storage.data_ptr(): piece.nbytes for piece in pieces if piece.nbytes}.values()))

    def give_back(self, piece: Piece) -> None:
        """Free a piece's memory whoever still refers to it (``set_`` to something empty would not); once is enough.

        The memory of a fused tensor goes with the first of its segments; they are handed over together.
        """
        self.drop(piece.tensor)

    def drop(self, tensor: torch.Tensor) -> None:
        """Free the storage of a tensor that this pool gave out or holds."""
        storage = tensor.untyped_storage()
        self._discount(storage.nbytes())
        if storage.resizable():  # else it is freed with its last holder: see Piece.pinned
            if storage.device.type == "cpu":
                discard(storage)
            storage.resize_(0)

    def restore(self, piece: Piece) -> None:
        """Give a piece that was given back its memory again, visible to all its aliases; its content is undefined."""
        if piece.storage.nbytes() == piece.nbytes:
            return
        with self._counted(piece.nbytes), mapped_apart():
            piece.storage.resize_(piece.nbytes)
        self._prepare(piece.tensor)

    @contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        """Count what is allocated inside, before it is; not where that fails."""
        self._count(nbytes)
        try:
            yield
        except BaseException:
            self._discount(nbytes)
            raise

    def _count(self, nbytes: int) -> None:
        if self.promise is not None:
            self.promise.take(nbytes)
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def _discount(self, nbytes: int) -> None:
        if self.promise is not None:
            self.promise.give_back(nbytes)
        self.held -= nbytes

    def _prepare(self, tensor: torch.Tensor) -> None:
        """Choose pages; zero what lies around ``tensor`` in its storage; poison the tensor itself."""
        if self.device.type == "cpu":
            prefer_huge(tensor.untyped_storage())
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.itemsize
        whole[:start].zero_()
        whole[start + tensor.nbytes :].zero_()
        if self._poison and tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif self._poison:
            whole[start : start + tensor.nbytes].fill_(_POISON_BYTE)
