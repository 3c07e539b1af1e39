"""One save as one rank takes part in it: a snapshot beside a step, then files in the background, then one rename.

Nothing here stops training: whatever goes wrong ends the save alone, on all ranks with the same reason. Ranks agree
over the board, never by a collective.
"""

import logging
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
from dynatrain.execute.dcp_save import write_chunks, write_metadata
from dynatrain.judge.shelves import judge_shelf
from dynatrain.observe.checkpoints import SCHEMA, File, Manifest, complete, partial_folder, prune, usable
from dynatrain.plan.plan import Granule
from dynatrain.plan.replicas import named, unlike
from dynatrain.space.tensor import Catalogue
from dynatrain.train.agreement import Objection, SwitchAbortedError, exchange, objection_of
from dynatrain.train.keys import STATE, extra_path, flat, group_paths, streams_path
from dynatrain.train.party import Party
from dynatrain.train.taken import Taken, agreed
from dynatrain.train.world import World

_LOG = logging.getLogger(__name__)


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
        self._taken: Taken | None = None
        self._objection: Objection | None = None
        try:
            self._taken = Taken.of(party, world, step, saves.budget)
        except Exception as problem:  # noqa: BLE001 - told to all ranks; a save never ends a run
            self._objection = objection_of(problem)
        self._thread = threading.Thread(target=self._run, name=f"save-{number}", daemon=True)
        self.step = step
        self.problem = ""
        self.unchanged = False

    def start(self) -> None:
        """Begin."""
        if self._taken is not None:
            self._taken.snapshot.start()
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Before anything writes what is saved. Gives the save up where the copies cannot be had in time."""
        if self._taken is not None and not self._taken.snapshot.wait_copied(self._party.deadline):
            self._taken.snapshot.give_up(
                f"the disk is too slow: the snapshot took more than {self._party.deadline:g} s"
            )

    def give_up(self, why: str) -> None:
        """Copy no more; the thread then finds that it cannot write, or that the others do not vote."""
        if self._taken is not None:
            self._taken.snapshot.give_up(why)

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
            if self._taken is not None:
                self._taken.snapshot.give_up(self.problem)
            shutil.rmtree(partial_folder(self._folder), ignore_errors=True)

    def _save(self) -> None:
        partial, taken = partial_folder(self._folder), self._taken
        objection, told, there = self._objection, None, False
        try:
            if taken is not None:
                taken.require_readable()
            if self._rank == 0:
                there = usable(self._folder)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection or objection_of(problem)
        heard = self._ask("begin", [there, taken and taken.told()], objection)
        assert taken is not None
        self.unchanged = heard[0][0]  # by rank 0's word: another may not see the folder yet
        if self.unchanged:
            taken.snapshot.give_up("there is nothing to save")
            shutil.rmtree(partial, ignore_errors=True)
            return
        names, extra = agreed([of_rank for _, of_rank in heard])
        groups = [group | {"params": its} for group, its in zip(taken.account.groups, names, strict=True)]
        objection = None
        try:
            partial.mkdir(parents=True, exist_ok=True)  # there already, if all share the disk, as they must
            objects = {flat(place): value for place, value in taken.objects(groups).items()}
            text = write_chunks(partial, self._rank, taken.chunks, objects)
            files = [[file.name, file.size, file.xxh3] for file in _files(partial, f"__{self._rank}_")]
            taken.snapshot.wait_looked()
            told = [text, files, taken.replicas.told()]
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            # Why there is no copy counts more than that it could not be written.
            objection = Objection(why=taken.snapshot.over) if taken.snapshot.over else objection_of(problem)
        everyone = self._ask("written", told, objection)
        self._compare(taken, [hashes for *_, hashes in everyone])
        objection = None
        if self._rank == 0:
            try:
                self._complete(taken, everyone, groups, extra)
            except Exception as problem:  # noqa: BLE001 - told to all ranks
                objection = objection_of(problem)
        self._ask("complete", None, objection)

    def _compare(self, taken: Taken, told: list[dict[str, str]]) -> None:
        """Hold copies against each other, of which one was written for all.

        Raises:
            SwitchAbortedError: they differ, and the job is not to take the first; by name, on every rank alike.
        """
        differ = unlike(told)
        if not differ:
            return
        said = named(self._ask("copies", taken.replicas.each(differ), None))
        if self._party.unequal_copies == "refuse":
            raise SwitchAbortedError(said)
        if self._rank == 0:
            _LOG.warning("%s; copy 0 is saved, as unequal_copies = 'owner' says", said)

    def _complete(self, taken: Taken, everyone: list[Any], groups: list[dict[str, Any]], extra: set[str]) -> None:
        partial = partial_folder(self._folder)
        files = [File(*file) for _, its, _ in everyone for file in its]
        if unseen := [file.name for file in files if not (partial / file.name).is_file()]:
            raise FileNotFoundError(
                f"{', '.join(unseen)} cannot be seen from rank 0: all ranks must share the disk of {self._saves.root}"
            )
        places = taken.places | {flat(STATE): STATE} | {flat(place): place for place in group_paths(groups)}
        beside = [*(streams_path(rank) for rank in self._party.everyone), *map(extra_path, sorted(extra))]
        places |= {flat(place): place for place in beside}
        write_metadata(partial, [text for text, *_ in everyone], places)
        require_whole(DcpFolder(partial), taken.catalogue, taken.keys)
        complete(partial, self._folder, self._manifest(taken, [*files, File.of(partial / METADATA)]))
        prune(self._saves.root, self._saves.keep_last)

    def _manifest(self, taken: Taken, files: list[File]) -> Manifest:
        states = dict.fromkeys(state.name for tensor in taken.catalogue for state in tensor.states)
        return Manifest(
            schema=SCHEMA,
            run_id=self._saves.run_id,
            step=self.step,
            layout=taken.account.layout,
            world_size=self._party.world_size,
            states=tuple(states),
            objects=tuple(taken.account.common),
            files=tuple(files),
            versions={"dynatrain": dynatrain.__version__, "torch": torch.__version__},
        )

    def _ask(self, what: str, payload: Any, objection: Objection | None) -> list[Any]:
        party, topic = self._party, f"{self._topic}/{what}"
        wait = self._saves.deadline
        return exchange(party.board, topic, party.rank, payload=payload, objection=objection, timeout=wait).in_order()


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


def _files(folder: Path, prefix: str) -> list[File]:
    return [File.of(path) for path in sorted(folder.iterdir()) if path.name.startswith(prefix)]
