"""A live world filled from files: the plan says what each rank reads, the judge that it is everything, once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dynatrain.execute.dcp_folder import DcpFolder, FolderError
from dynatrain.execute.shelf import Shelf, boxes_of, read_into
from dynatrain.judge.shelves import judge_reads, judge_shelf
from dynatrain.observe.checkpoints import MANIFEST, CheckpointError, Manifest, damaged
from dynatrain.plan.shelves import reads
from dynatrain.space.box import volume, whole
from dynatrain.space.tensor import Catalogue, values_of
from dynatrain.train.account import OPTIMIZERS, group_names, mismatches, take
from dynatrain.train.agreement import SwitchAbortedError, exchange, objection_of
from dynatrain.train.extra_state import give_extra_states
from dynatrain.train.keys import GROUPS, STATE, extra_path, flat, granule_path, streams_path
from dynatrain.train.live import renew_buffers, reshard
from dynatrain.train.param_groups import ParamGroupError, match, merged
from dynatrain.train.party import Party
from dynatrain.train.streams import Streams
from dynatrain.train.world import World

LOAD_SECONDS = 600.0
"""How far apart ranks may be: a cold disk gives one of them its files later than the others."""

Rename = Callable[[str], str]
"""From the key that a state has in our checkpoints to the one that it has in somebody else's."""


def load(party: Party, world: World, path: Path, topic: str, rename: Rename | None = None) -> int:
    """Fill everything that ``world`` holds from a checkpoint, in whatever layout that was written. On all ranks.

    Every rank reads its own boxes, and nothing is written before all ranks have found everything that they need.

    Args:
        party: this rank.
        world: bound; its tensors, optimizer state and registered objects are overwritten in place.
        path: a checkpoint of ours, or a DCP folder of somebody else's, which has tensors only. Of one whose manifest
            says that it has weights only, the parameters are taken, and everything else stays as it begins.
        topic: of the questions to the other ranks; never used before.
        rename: for somebody else's folder.

    Returns:
        The step that comes next; 0 for somebody else's folder, and for weights.

    Raises:
        SwitchAbortedError: it cannot be loaded: what is missing, what is left over, what is damaged; on all ranks.
    """
    objection, found = None, None
    here = [sorted({owner.name for owner in world.owners}), group_names(world)]
    try:
        found = _Found(party, world, path, rename)
    except Exception as problem:  # noqa: BLE001 - told to all ranks
        objection = objection_of(problem)
    told = exchange(party.board, topic, party.rank, payload=here, objection=objection, timeout=LOAD_SECONDS)
    assert found is not None
    found.match(told.in_order())
    objection = None
    try:
        found.fill()
    except Exception as problem:  # noqa: BLE001 - told to all ranks
        objection = objection_of(problem)
    exchange(party.board, f"{topic}/filled", party.rank, payload=None, objection=objection, timeout=LOAD_SECONDS)
    return found.step


class _Found:
    """What a checkpoint holds for one rank, looked through before anything is changed."""

    def __init__(self, party: Party, world: World, path: Path, rename: Rename | None) -> None:
        self._party = party
        self._world = world
        for part in world.parts:
            reshard(part)  # what a forward has gathered would hide what is loaded from the next one
        renew_buffers(world.parts, world.found)
        self._folder = DcpFolder(path)
        self._manifest = Manifest.read(path) if (path / MANIFEST).exists() else None
        if self._manifest is not None:
            mine = self._manifest.files[party.rank :: party.world_size]
            if problems := damaged(path, mine):
                raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
        self._account = self._folder.read(flat(STATE)) if flat(STATE) in self._folder.objects else None
        # An optimizer without state saves no more than parameters either; what it saves has an account of the run.
        weights = self._manifest is not None and self._manifest.weights_only and self._account is None
        catalogue = values_of(world.catalogue) if weights else world.catalogue
        self._shelf = shelf_of(catalogue, world.forms, self._folder, rename or (lambda key: key))
        self._options: list[dict[str, Any]] = []
        if self._account is not None and (
            wrong := mismatches(world, self._account["objects"], self._account.get(OPTIMIZERS, {}))
        ):
            raise FolderError(f"{path} cannot be loaded", wrong)
        assert world.ownership is not None
        boxes = boxes_of(self._shelf, catalogue)
        self._fetches = reads(catalogue, boxes, world.ownership, party.rank)
        problems = judge_reads(catalogue, boxes, world.ownership, party.rank, self._fetches)
        if party.rank == 0:
            problems += judge_shelf(catalogue, boxes)
        if problems:
            raise FolderError(f"{path} cannot be loaded", problems)

    @property
    def step(self) -> int:
        """The step that comes next."""
        return int(self._account["step"]) if self._account else 0

    def match(self, told: list[list[Any]]) -> None:
        """Hold its extra state and its parameter groups against those here.

        Args:
            told: by rank, whose extra state it has, and the names in its parameter groups.

        Raises:
            SwitchAbortedError: by name; on every rank alike.
        """
        if self._account is None:
            return
        problems = self._unlike_extra({name for names, _ in told for name in names})
        try:
            saved = _param_groups(self._folder)
            names = {number: group.get("params", ()) for number, group in saved.items()}
            self._options = [saved[number] for number in match(names, merged([groups for _, groups in told]))]
        except ParamGroupError as problem:
            problems.append(str(problem))
        if problems:
            raise SwitchAbortedError(f"{self._folder.path} cannot be loaded: {'; '.join(problems)}")

    def _unlike_extra(self, here: set[str]) -> list[str]:
        prefix = flat(extra_path(""))
        saved = {key.removeprefix(prefix) for key in self._folder.objects if key.startswith(prefix)}
        problems = [f"it has extra state of {name}, which no module here has" for name in sorted(saved - here)]
        return problems + [f"it has no extra state of {name}" for name in sorted(here - saved)]

    def fill(self) -> None:
        """Overwrite everything. What may refuse its state, a registered object or a module, is asked first."""
        party, world = self._party, self._world
        if self._account is not None:
            take(world, self._account["objects"], self._options, self._account.get(OPTIMIZERS, {}))
            names = {owner.name for owner in world.owners}
            give_extra_states(world.owners, {name: self._folder.read(flat(extra_path(name))) for name in names})
        pieces = world.pieces(party.rank, party.device)
        read_into(pieces, self._shelf, world.catalogue, self._fetches)
        world.write_back(pieces)
        if self._account is not None:
            _restore_streams(self._folder, party.rank, self.step, party.device)


def take_rest(folder: DcpFolder, account: Mapping[str, Any], world: World, rank: int, device: torch.device) -> None:
    """Give a world of the run that has written a checkpoint what that says of all that is no tensor.

    Args:
        folder: the checkpoint.
        account: its own.
        world: bound; its objects, its optimizer's groups and its modules' extra state are written.
        rank: in that world, whose random streams are restored, too.
        device: of the streams.
    """
    take(world, account["objects"], list(_param_groups(folder).values()), account.get(OPTIMIZERS, {}))
    names = {owner.name for owner in world.owners}
    give_extra_states(world.owners, {name: folder.read(flat(extra_path(name))) for name in names})
    _restore_streams(folder, rank, int(account["step"]), device)


def _restore_streams(folder: DcpFolder, rank: int, step: int, device: torch.device) -> None:
    mine, first = (flat(streams_path(number)) for number in (rank, 0))
    if mine in folder.objects:
        Streams.of(folder.read(mine)).restore(device)
    elif first in folder.objects:
        Streams.of(folder.read(first)).of_new_rank(rank, step, device).restore(device)


def _param_groups(folder: DcpFolder) -> dict[int, dict[str, Any]]:
    """The parameter groups of a checkpoint, by number; ``params`` are names."""
    found: dict[int, dict[str, Any]] = {}
    for key in folder.objects:
        if key.startswith(GROUPS):
            number, option = key.removeprefix(GROUPS).split(".", 1)
            found.setdefault(int(number), {})[option] = folder.read(key)
    return dict(sorted(found.items()))


def shelf_of(catalogue: Catalogue, forms: Mapping[str, Any], folder: DcpFolder, rename: Rename) -> Shelf:
    """The folder's tensors under our names.

    Raises:
        FolderError: what is missing here or there, and what has another shape or another kind of element, by name.
    """
    found, problems, used = {}, [], set()
    for tensor in catalogue:
        for number, state in enumerate(tensor.states):
            ours = flat(granule_path(tensor.name, state.name, first=number == 0, forms=forms))
            key = next((key for key in _spellings(rename(ours)) if key in folder.shapes), "")
            shape = tensor.state_shape(state)
            if not key:
                if volume(whole(shape)):
                    problems.append(f"it has no {rename(ours)}")
            elif folder.shapes[key] != shape:
                problems.append(f"{key} has shape {folder.shapes[key]}, here it is {shape}")
            elif not holds(getattr(torch, state.dtype), folder.dtypes[key]):
                there = str(folder.dtypes[key]).removeprefix("torch.")
                problems.append(
                    f"{key} is {there}, and here it is {state.dtype}, which cannot hold every value of that"
                )
            else:
                used.add(key)
                found[tensor.name, state.name] = folder.stored(key)
    problems += [f"it has {key}, which nothing here takes" for key in folder.shapes if key not in used]
    if problems:
        raise FolderError(f"{folder.path} cannot be loaded", tuple(problems))
    return found


def holds(here: torch.dtype, there: torch.dtype) -> bool:
    """Whether every value of the element type ``there`` is one of ``here``; fractions do not take whole numbers."""
    if here == there or (there == torch.bool and not (here.is_floating_point or here.is_complex)):
        return True
    if here == torch.bool or here.is_complex != there.is_complex or here.is_floating_point != there.is_floating_point:
        return False
    if here.is_floating_point or here.is_complex:
        ours, its = torch.finfo(here), torch.finfo(there)
        return ours.eps <= its.eps and ours.max >= its.max and ours.tiny <= its.tiny
    return torch.iinfo(here).min <= torch.iinfo(there).min and torch.iinfo(here).max >= torch.iinfo(there).max


def _spellings(key: str) -> tuple[str, ...]:
    """How others may spell a key: models at the top, optimizers in full."""
    head, _, rest = key.partition(".")
    if head == "model":
        return key, rest
    return (key, f"optimizer.{rest}", rest) if head == "optim" else (key,)
