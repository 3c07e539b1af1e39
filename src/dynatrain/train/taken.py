"""What a save takes at a step edge, before the next step writes it; the rest is copied beside that step."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from dynatrain.execute.dcp_save import Chunk
from dynatrain.execute.pieces import Pieces
from dynatrain.plan.plan import Granule
from dynatrain.plan.replicas import peers
from dynatrain.plan.shelves import written_pieces
from dynatrain.space.tensor import Catalogue
from dynatrain.train.account import Account, group_names
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.equal import hash_of, require_equal
from dynatrain.train.extra_state import extra_states, hashes_of, speaks, unlike, unreadable
from dynatrain.train.install import check_tensors, other_states
from dynatrain.train.keys import STATE, Place, extra_path, flat, granule_paths, group_paths, streams_path
from dynatrain.train.live import renew_buffers, reshard
from dynatrain.train.optimizer_settings import require_kept
from dynatrain.train.param_groups import ParamGroupError, merged
from dynatrain.train.party import Party
from dynatrain.train.registered import common_of
from dynatrain.train.replicas import Replicas
from dynatrain.train.snapshot import Snapshot
from dynatrain.train.world import World
from dynatrain.train.written import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One rank's.

    Attributes:
        rank: this rank.
        account: of what is no tensor.
        names: of this rank's parameters in each parameter group.
        extra: extra state that this rank writes, by module.
        extra_hashes: of the extra state of all modules that it has.
        catalogue: all tensors.
        keys: what each state is called in the checkpoint.
        places: where each of these keys stands.
        snapshot: copies of what this rank writes.
        chunks: which take them.
        replicas: hashes of what other ranks hold, too; complete when the snapshot and the chunks have been read.
    """

    rank: int
    account: Account
    names: list[list[str]]
    extra: dict[str, Any]
    extra_hashes: dict[str, str]
    catalogue: Catalogue
    keys: dict[Granule, str]
    places: dict[str, Place]
    snapshot: Snapshot
    chunks: list[Chunk]
    replicas: Replicas

    @classmethod
    def of(cls, party: Party, world: World, step: int, budget: int) -> Self:
        """Take it. The snapshot is still to be started.

        Raises:
            SwitchAbortedError, UnknownStateError: what is there is not what the job began with, by name.
        """
        for part in world.parts:
            reshard(part)
        renew_buffers(world.parts, world.found)
        check_tensors(party, world)
        require_kept(world.built_optimizer, world.optimizer)
        if changed := other_states(world, world.catalogue):
            raise SwitchAbortedError(f"the states of {', '.join(changed)} are not those at the start")
        assert world.ownership is not None
        paths = dict(granule_paths(world))
        keys = {granule: flat(place) for granule, place in paths.items()}
        # Unequal copies dealt out to their writers would be a mixture of all.
        dealt = party.unequal_copies == "refuse"
        mine = written_pieces(world.catalogue, world.ownership, party.rank, dealt=dealt)
        replicas = Replicas(world.catalogue, peers(world.catalogue, world.ownership, party.rank))
        pieces = world.pieces(party.rank, party.device)
        snapshot = _snapshot(world, pieces, {granule: keys[granule] for granule in mine}, replicas, budget)
        return cls(
            rank=party.rank,
            account=Account.of(party, world, step),
            names=group_names(world),
            extra=copy.deepcopy(extra_states(world.owners)) if speaks(world.layout, party.rank) else {},
            extra_hashes=hashes_of(world.owners),
            catalogue=world.catalogue,
            keys=keys,
            places={flat(place): place for place in paths.values()},
            snapshot=snapshot,
            chunks=[_chunk(world, pieces, granule, keys[granule], snapshot, replicas) for granule in mine],
            replicas=replicas,
        )

    def told(self) -> list[Any]:
        """What the other ranks have to know of it: see :func:`agreed`."""
        account = self.account
        facts = common_of(account.common, account.groups)
        facts["what the optimizer keeps on itself"] = hash_of(account.optimizers)
        return [self.names, facts, self.extra_hashes, list(self.extra)]

    def require_readable(self) -> None:
        """Refuse state that could be written and not read back: reading runs no code of a pickle's.

        Raises:
            ValueError: whose it is.
        """
        for label, state in (self.extra | ({} if self.rank else self.account.common)).items():
            if why := unreadable(state):
                raise ValueError(f"the state of {label} could not be read back; {why}")

    def objects(self, groups: list[dict[str, Any]]) -> dict[Place, Any]:
        """What this rank's file holds beside tensors.

        Args:
            groups: parameter groups of the whole job.
        """
        found: dict[Place, Any] = {streams_path(self.rank): self.account.streams}
        found |= {extra_path(name): state for name, state in self.extra.items()}
        return found if self.rank else found | {STATE: self.account.table()} | group_paths(groups)


def agreed(told: list[list[Any]]) -> tuple[list[list[str]], set[str]]:
    """What is one for all ranks, by what they have told: the names in each parameter group, whose extra state there is.

    Raises:
        SwitchAbortedError: something is not equal on all ranks, or would not be written, by name; on every rank alike.
    """
    require_equal([facts for _, facts, _, _ in told])
    problems = unlike([hashes for _, _, hashes, _ in told])
    written = {name for *_, names in told for name in names}
    lost = {name for _, _, hashes, _ in told for name in hashes} - written
    problems += [f"the first rank of its stage has no module {name}, whose extra state is to be saved" for name in lost]
    if problems:
        raise SwitchAbortedError("; ".join(sorted(problems)))
    try:
        return merged([names for names, *_ in told]), written
    except ParamGroupError as problem:
        raise SwitchAbortedError(str(problem)) from None


def _snapshot(world: World, pieces: Pieces, mine: Mapping[Granule, str], replicas: Replicas, budget: int) -> Snapshot:
    """Copies of what this rank writes, and a look at what it does not and others have, too."""
    tensors: dict[str, torch.Tensor] = {}
    by_key = {key: granule for granule, key in mine.items()} | {f"{granule}": granule for granule in pieces}
    watch = Watch(world, pieces, closely=True)
    looks: dict[str, Callable[[], None]] = {}
    for granule, piece in pieces.items():
        name = world.catalogue[granule[0]].states[granule[1]].name
        # What a forward may write, or code between two optimizer steps, is copied, or looked at, at once.
        early = name == "buffer" or name in world.forms
        if granule in mine:
            tensors[mine[granule]] = piece.tensor.clone() if early else piece.tensor
        elif early:
            replicas.note(granule, piece.tensor)
        elif granule in replicas.peers:
            looks[f"{granule}"] = partial(replicas.note, granule, piece.tensor)
    return Snapshot(tensors, budget, looks, check=lambda key: watch.require_unwritten(by_key[key]))


def _chunk(world: World, pieces: Pieces, granule: Granule, key: str, snapshot: Snapshot, replicas: Replicas) -> Chunk:
    tensor, piece = world.catalogue[granule[0]], pieces[granule]

    def data() -> torch.Tensor:
        copied = snapshot.take(key)
        replicas.note(granule, copied)
        return copied

    return Chunk(key, tensor.state_shape(tensor.states[granule[1]]), piece.tensor.dtype, piece.box, data)
