"""The books of a loop that has no agent of ours: events and certificates in a folder that it names."""

from pathlib import Path

from dynatrain.observe.objects import ObjectError, read_object
from dynatrain.observe.run import RunFolder
from dynatrain.observe.versions import environment
from dynatrain.train.agreement import on_every_rank
from dynatrain.train.argument import ArgumentError
from dynatrain.train.party import Party
from dynatrain.train.record import Recorder


def recorder_in(party: Party, path: Path, layout: str, given: Recorder | None) -> tuple[Recorder, int]:
    """A recorder that writes into a run's folder, which is made where it is not there. All ranks call it.

    Args:
        party: this rank.
        path: of the folder, on a disk that all ranks see.
        layout: the job's first one.
        given: a recorder that the loop gives as well, which cannot be.

    Returns:
        The recorder, and the number of the last switch in the folder, of an earlier start.

    Raises:
        ArgumentError: there is a recorder already, or an agent of ours, which has a folder.
        RunError: the folder cannot be made, or a rank does not see it; on every rank.
    """
    if given is not None or party.worlds is not None:
        raise ArgumentError("folder is for a loop that has neither a recorder nor dynatrain's agent; nearest: recorder")
    run = RunFolder(path.absolute())

    def make() -> None:
        if party.rank == 0 and not run.exists:
            RunFolder.create(run.path, config=f'layout = "{layout}"\n', environment=environment())

    on_every_rank(party.board, "folder/made", party.rank, make, timeout=party.deadline)
    on_every_rank(party.board, "folder/seen", party.rank, lambda: RunFolder.open(path), timeout=party.deadline)
    before = max((int(one.name) for one in run.switches.iterdir() if one.name.isdigit()), default=0)
    attempt = 1 + _attempt(run.switch(before) / "certificate.json") if before else 0
    kept = Recorder(run, party.board, rank=party.rank, generation=party.generation, attempt=attempt, rates=None)
    return kept, before


def _attempt(certificate: Path) -> int:
    """Of which start of the job it tells; 0 where it cannot be read."""
    try:
        found = read_object(certificate).get("attempt")
    except (OSError, ObjectError):
        return 0
    return found if isinstance(found, int) else 0
