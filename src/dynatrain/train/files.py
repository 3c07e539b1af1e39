"""A checkpoint as what is left of a state after a loss: what no memory has any more is read out of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from dynatrain.execute.dcp_folder import DcpFolder
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.shelf import Shelf, boxes_of, read_into
from dynatrain.judge.shelves import judge_shelf
from dynatrain.observe.checkpoints import CheckpointError, Manifest, checkpoints, damaged, step_of, usable
from dynatrain.plan.plan import Boxes, Fetch, Granule, Loss
from dynatrain.plan.shelves import reads_of_rest
from dynatrain.space.box import Box, intersect, shape_of
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue
from dynatrain.train.keys import STATE, flat
from dynatrain.train.loading import shelf_of, take_rest
from dynatrain.train.world import World


def complete_steps(root: Path | None) -> tuple[int, ...]:
    """The steps of the complete checkpoints under ``root``, ascending; a checkpoint of weights alone is none."""
    found = checkpoints(root) if root is not None else ()
    return tuple(step_of(path) for path in found if usable(path) and not Manifest.read(path).weights_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """One checkpoint, looked through by one survivor.

    Attributes:
        folder: the checkpoint.
        shelf: its tensors, under our names.
        catalogue: all tensors.
        boxes: which boxes of them it has.
    """

    folder: DcpFolder
    shelf: Shelf
    catalogue: Catalogue
    boxes: Boxes

    @classmethod
    def open(cls, path: Path, world: World, share: slice) -> Self:
        """Look through a checkpoint for what ``world``, which has lost members, consists of.

        Args:
            path: of the checkpoint.
            world: its catalogue says what is looked for.
            share: of its files those whose bytes this rank checks.

        Raises:
            CheckpointError: it is damaged.
            FolderError: it lacks something, by name.
        """
        if problems := damaged(path, Manifest.read(path).files[share]):
            raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
        folder = DcpFolder(path)
        shelf = shelf_of(world.catalogue, world.forms, folder, lambda key: key)
        boxes = boxes_of(shelf, world.catalogue)
        if wrong := judge_shelf(world.catalogue, boxes):
            raise CheckpointError(f"{path} is not whole: {'; '.join(wrong)}")
        return cls(folder=folder, shelf=shelf, catalogue=world.catalogue, boxes=boxes)

    def fetches(self, old: Ownership, new: Ownership, rank: int, loss: Loss) -> tuple[Fetch, ...]:
        """What a rank reads."""
        return reads_of_rest(self.catalogue, self.boxes, old, new, rank, loss)

    def fill(self, pieces: Pieces, fetches: tuple[Fetch, ...]) -> None:
        """Read it."""
        read_into(pieces, self.shelf, self.catalogue, fetches)

    def take_rest(self, world: World, rank: int, device: torch.device) -> None:
        """What is no tensor, of the checkpoint's step: see :func:`~dynatrain.train.loading.take_rest`."""
        account: Mapping[str, Any] = self.folder.read(flat(STATE))
        take_rest(self.folder, account, world, rank, device)

    def pieces(self, boxes: Mapping[Granule, Box]) -> Mapping[Granule, Piece]:
        """Pieces of these boxes, each read when it is asked for and kept by nobody: for digests."""
        return _Read(self, boxes)


class _Read(Mapping[Granule, Piece]):
    def __init__(self, files: Files, boxes: Mapping[Granule, Box]) -> None:
        self._files = files
        self._boxes = boxes

    def __getitem__(self, granule: Granule) -> Piece:
        box, (index, at) = self._boxes[granule], granule
        state = self._files.catalogue[index].states[at]
        piece = Piece(torch.empty(shape_of(box), dtype=getattr(torch, state.dtype)), box)
        places = enumerate(self._files.boxes[granule])
        fetches = [
            Fetch(granule, common, place) for place, one in places if (common := intersect(box, one)) is not None
        ]
        read_into({granule: piece}, self._files.shelf, self._files.catalogue, fetches)
        return piece

    def __contains__(self, granule: object) -> bool:
        return granule in self._boxes

    def __iter__(self) -> Iterator[Granule]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)
