"""One save as one rank takes part in it: a snapshot beside a step, then files in the background, then one rename.

Nothing here stops training: whatever goes wrong ends the save alone, on all ranks with the same reason. Ranks agree
over the board, never by a collective.
"""

import copy
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dynatrain
from dynatrain.cluster.kernel import step_aside
from dynatrain.execute.dcp_folder import METADATA, DcpFolder, FolderError
from dynatrain.execute.dcp_save import Chunk, write_chunks, write_metadata
from dynatrain.judge.shelves import judge_shelf
from dynatrain.observe.checkpoints import SCHEMA, File, Manifest, complete, partial_folder, prune, usable
from dynatrain.plan.plan import Granule
from dynatrain.plan.shelves import written_pieces
from dynatrain.space.tensor import Catalogue
from dynatrain.train.account import Account
from dynatrain.train.agreement import Objection, SwitchAbortedError, exchange, objection_of
from dynatrain.train.extra_state import extra_states, speaks, unreadable
from dynatrain.train.keys import STATE, Place, extra_path, flat, granule_paths, group_paths, streams_path
from dynatrain.train.party import Party
from dynatrain.train.snapshot import Snapshot
from dynatrain.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """How a job is saved.

    Attributes:
        root: where checkpoints are; on a disk that all ranks share.
        run_id: of the run.
        every: steps between two saves; 0 for none by themselves.
        keep_last: checkpoints that stay.
        budget: bytes of a rank's snapshot that may wait for the disk; 0 for no bound.
        deadline: seconds that a save may take.
    """

    root: Path
    run_id: str = ""
    every: int = 0
    keep_last: int = 2
    budget: int = 0
    deadline: float = 600.0


class Saving:
    """See the module's text.

    Args:
        party: this rank.
        saves: how.
        world: what is saved, as it is now: at a step edge.
        step: the next step.
        folder: of the checkpoint to come.
        number: of the save, for its questions.

    Attributes:
        step: that is saved.
        problem: why it failed; empty where it has not.
        unchanged: the step was saved already, and nothing was written.
    """

    def __init__(self, party: Party, saves: Saves, world: World, step: int, folder: Path, number: int) -> None:
        self._party = party
        self._saves = saves
        self._folder = folder
        self._topic = f"c{number}"
        self._rank = party.rank
        self._account = Account.of(party, world, step)
        self._extra = copy.deepcopy(extra_states(world.owners)) if speaks(world.layout, party.rank) else {}
        self._places: dict[str, Place] = {flat(place): place for _, place in granule_paths(world)}
        self._states = tuple(dict.fromkeys(state.name for tensor in world.catalogue for state in tensor.states))
        self._snapshot, self._chunks = _chunks(party, saves, world)
        self._catalogue = world.catalogue
        self._keys = {granule: flat(place) for granule, place in granule_paths(world)}
        self._thread = threading.Thread(target=self._run, name=f"save-{number}", daemon=True)
        self.step = step
        self.problem = ""
        self.unchanged = False

    def start(self) -> None:
        """Begin."""
        self._snapshot.start()
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Before anything writes what is saved. Gives the save up where the copies cannot be had in time."""
        if not self._snapshot.wait_copied(self._party.deadline):
            self._snapshot.give_up(f"the disk is too slow: the snapshot took more than {self._party.deadline:g} s")

    def give_up(self, why: str) -> None:
        """Copy no more; the thread then finds that it cannot write, or that the others do not vote."""
        self._snapshot.give_up(why)

    def join(self, seconds: float) -> None:
        """Wait for its end, at most that long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            step_aside()
            self._save()
        except SwitchAbortedError as abort:
            self.problem = str(abort)
        except Exception as error:  # noqa: BLE001 - a save never ends a run
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem:
            self._snapshot.give_up(self.problem)
            shutil.rmtree(partial_folder(self._folder), ignore_errors=True)

    def _save(self) -> None:
        partial = partial_folder(self._folder)
        objection, told, there = None, None, False
        try:
            self._require_readable()
            if self._rank == 0:
                there = usable(self._folder)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        names = [group["params"] for group in self._account.groups]
        heard = self._ask("begin", [there, names, list(self._extra)], objection)
        self.unchanged = heard[0][0]  # by rank 0's word: another may not see the folder yet
        if self.unchanged:
            self._snapshot.give_up("there is nothing to save")
            shutil.rmtree(partial, ignore_errors=True)
            return
        groups = _merged(self._account.groups, [names for _, names, _ in heard])
        objection = None
        try:
            partial.mkdir(parents=True, exist_ok=True)  # there already, if all share the disk, as they must
            objects = self._objects(groups)
            told = [write_chunks(partial, self._rank, self._chunks, {flat(place): v for place, v in objects.items()})]
            told += [[file.name, file.size, file.xxh3] for file in _files(partial, f"__{self._rank}_")]
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        everyone = self._ask("written", told, objection)
        objection = None
        if self._rank == 0:
            try:
                self._complete(partial, everyone, groups, {name for *_, names in heard for name in names})
            except Exception as problem:  # noqa: BLE001 - told to all ranks
                objection = objection_of(problem)
        self._ask("complete", None, objection)

    def _complete(self, partial: Path, everyone: list[Any], groups: list[dict[str, Any]], extra: set[str]) -> None:
        files = [File(*file) for _, *named in everyone for file in named]
        if unseen := [file.name for file in files if not (partial / file.name).is_file()]:
            raise FileNotFoundError(
                f"{', '.join(unseen)} cannot be seen from rank 0: all ranks must share the disk of {self._saves.root}"
            )
        places = self._places | {flat(STATE): STATE} | {flat(place): place for place in group_paths(groups)}
        beside = [*(streams_path(rank) for rank in self._party.everyone), *map(extra_path, sorted(extra))]
        places |= {flat(place): place for place in beside}
        write_metadata(partial, [text for text, *_ in everyone], places)
        require_whole(DcpFolder(partial), self._catalogue, self._keys)
        complete(partial, self._folder, self._manifest([*files, File.of(partial / METADATA)]))
        prune(self._saves.root, self._saves.keep_last)

    def _require_readable(self) -> None:
        """Refuse state that could be written and not read back: reading runs no code of a pickle's.

        Raises:
            ValueError: whose it is.
        """
        for label, state in (self._extra | (self._account.common if self._rank == 0 else {})).items():
            if why := unreadable(state):
                raise ValueError(f"the state of {label} could not be read back; {why}")

    def _objects(self, groups: list[dict[str, Any]]) -> dict[Place, Any]:
        """What this rank's file holds beside tensors."""
        found: dict[Place, Any] = {streams_path(self._rank): self._account.streams}
        found |= {extra_path(name): state for name, state in self._extra.items()}
        return found if self._rank else found | {STATE: self._account.table()} | group_paths(groups)

    def _manifest(self, files: list[File]) -> Manifest:
        return Manifest(
            schema=SCHEMA,
            run_id=self._saves.run_id,
            step=self.step,
            layout=self._account.layout,
            world_size=self._party.world_size,
            states=self._states,
            objects=tuple(self._account.common),
            files=tuple(files),
            versions={"dynatrain": dynatrain.__version__, "torch": torch.__version__},
        )

    def _ask(self, what: str, payload: Any, objection: Objection | None) -> list[Any]:
        party, topic = self._party, f"{self._topic}/{what}"
        wait = self._saves.deadline
        return exchange(party.board, topic, party.rank, payload=payload, objection=objection, timeout=wait).in_order()


def _chunks(party: Party, saves: Saves, world: World) -> tuple[Snapshot, list[Chunk]]:
    """What this rank writes, and the snapshot that it comes from."""
    assert world.ownership is not None
    pieces = world.pieces(party.rank, party.device)
    mine = written_pieces(world.catalogue, world.ownership, party.rank)
    keys = {granule: flat(place) for granule, place in granule_paths(world) if granule in mine}
    tensors = {}
    for granule, key in keys.items():
        state = world.catalogue[granule[0]].states[granule[1]]
        value = pieces[granule].tensor
        # What a forward may write, or code between two optimizer steps, is copied at once.
        early = state.name == "buffer" or state.name in world.forms
        tensors[key] = value.clone() if early else value
    copies = Snapshot(tensors, saves.budget)
    chunks = []
    for granule, key in keys.items():
        tensor, piece = world.catalogue[granule[0]], pieces[granule]
        shape = tensor.state_shape(tensor.states[granule[1]])
        chunks.append(Chunk(key, shape, piece.tensor.dtype, piece.box, lambda key=key: copies.take(key)))
    return copies, chunks


def require_whole(folder: DcpFolder, catalogue: Catalogue, keys: Mapping[Granule, str]) -> None:
    """Refuse files that have not every element of every state once, by their own account.

    Args:
        folder: all files and their metadata.
        catalogue: what was to be saved.
        keys: what each state of it is called in the folder.

    Raises:
        FolderError: which states, and what is missing or comes twice.
    """
    boxes = {g: tuple(one.box for one in folder.stored(key)) for g, key in keys.items() if key in folder.shapes}
    if problems := judge_shelf(catalogue, boxes):
        raise FolderError(f"{folder.path} is not whole", problems)


def _merged(groups: list[dict[str, Any]], told: list[list[list[str]]]) -> list[dict[str, Any]]:
    """Parameter groups with the names of all ranks' parameters, each once."""
    names = [dict.fromkeys(name for names in of_rank for name in names) for of_rank in zip(*told, strict=True)]
    return [group | {"params": list(its)} for group, its in zip(groups, names, strict=True)]


def _files(folder: Path, prefix: str) -> list[File]:
    return [File.of(path) for path in sorted(folder.iterdir()) if path.name.startswith(prefix)]
