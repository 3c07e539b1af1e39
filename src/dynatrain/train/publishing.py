"""One publish as one rank takes part in it: a snapshot beside a step, then messages that the engine fetches.

Nothing here stops training: whatever goes wrong ends the publish alone, on all ranks with the same reason, and leaves
the engine with the version that it has. Ranks agree over the board, never by a collective. Rank 0 makes the engine's
calls; every rank serves what it holds, to whichever ranks of the engine need it, and none gathers.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dynatrain.cluster.kernel import step_aside
from dynatrain.execute.digest import MODULUS, digest_piece
from dynatrain.execute.engine_client import EngineClient
from dynatrain.execute.message import Content, message
from dynatrain.execute.serve import MessageServer
from dynatrain.plan.plan import Delivery
from dynatrain.plan.publish import Key, Publication
from dynatrain.space.box import within
from dynatrain.train.agreement import Objection, SwitchAbortedError, exchange, objection_of
from dynatrain.train.drawn import Base, Copies, Drawn, Held, nbytes_of
from dynatrain.train.install import check_tensors
from dynatrain.train.live import reshard
from dynatrain.train.party import Party
from dynatrain.train.snapshot import Snapshot
from dynatrain.train.world import World
from dynatrain.train.written import Watch

_MIB = 1 << 20


class PublishError(RuntimeError):
    """Weights were not published, and the engine serves what it has served before; equally on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publish has brought about.

    Attributes:
        version: of the weights: the step before which they were taken.
        base: the version of which changes were sent; None where all was.
        nbytes: that all ranks sent together.
        seconds: from the step edge to the engine's last answer.
        predicted: most bytes that each rank would hold on the host for it.
        measured: most that each held.
    """

    version: int
    base: int | None
    nbytes: int
    seconds: float
    predicted: tuple[int, ...]
    measured: tuple[int, ...]


class Publishing:
    """See the module's text. Made at a step edge, on all ranks at the same.

    Args:
        party: this rank.
        client: the engine's; rank 0 alone calls it.
        draw: gives the plan; what it raises is told to all ranks.
        world: what is published, as it is now.
        version: of the weights.
        topic: of its questions.
        base: what this engine was given last; None where that is not kept.
        changes: whether to send only changes, where that can be, and to keep what is sent for the next time.
        held: counts bytes.
        mib_per_second: most that this rank sends; 0 for no bound.
        host: the address of this rank for the engine's.
        deadline: seconds that it may take.
        greet: whether the engine is still to be told what it is taken for.

    Attributes:
        version: likewise.
        problem: why it failed; empty where it has not.
        published: what it has brought about; None before its end, or where it failed.
        base: what is kept for the next time.
    """

    def __init__(
        self,
        party: Party,
        client: EngineClient,
        draw: Callable[[], Drawn],
        world: World,
        *,
        version: int,
        topic: str,
        base: Base | None,
        changes: bool,
        held: Held,
        mib_per_second: float,
        host: str,
        deadline: float,
        greet: bool,
    ) -> None:
        self._board, self._rank, self._patience = party.board, party.rank, party.deadline
        self._client = client
        self._topic = topic
        self._changes = changes
        self._held = held
        self._settings = host, mib_per_second * _MIB, deadline
        self._greet = greet
        self._began = time.perf_counter()
        self._snapshot: Snapshot | None = None
        self._drawn: Drawn | None = None
        self._objection: Objection | None = None
        self._server: MessageServer | None = None
        self._copies: Copies = {}
        self._since: Base | None = None
        self.version = version
        self.problem = ""
        self.published: Published | None = None
        self.base = base
        try:
            self._drawn = draw()
            if base is not None and not (changes and base.fits(self._drawn.copies)):
                held.add(-base.nbytes)  # nothing can be told from it
                self.base = None
            held.peak = held.now
            self._snapshot = self._take(party, world, self._drawn)
        except Exception as problem:  # noqa: BLE001 - told to all ranks; a publish never ends a run
            self._objection = objection_of(problem)
        self._thread = threading.Thread(target=self._run, name=topic, daemon=True)

    def _take(self, party: Party, world: World, drawn: Drawn) -> Snapshot:
        """What is to be copied, before the next update writes it."""
        for part in world.parts:
            reshard(part)
        check_tensors(party, world)
        number = {tensor.name: index for index, tensor in enumerate(world.catalogue)}
        pieces = world.pieces(party.rank, party.device)
        views, taken = {}, {}
        for (index, box), how in drawn.copies.items():
            granule = number[drawn.publication.engine.catalogue[index].name], 0
            piece, taken[_label((index, box))] = pieces[granule], granule
            view = piece.tensor[within(box, piece.box)]
            view = view[0] if how.apart else view
            views[_label((index, box))] = view.T if how.transposed else view
        dtypes = {_label(key): getattr(torch, how.cast) for key, how in drawn.copies.items()}

        def copied(label: str, view: torch.Tensor) -> torch.Tensor:
            dtype = dtypes[label]
            self._held.add(view.numel() * dtype.itemsize)
            return torch.empty(view.shape, dtype=dtype).copy_(view)

        watch = Watch(world, {granule: pieces[granule] for granule in taken.values()}, closely=True)
        return Snapshot(views, 0, copy=copied, check=lambda label: watch.require_unwritten(taken[label]))

    def start(self) -> None:
        """Begin."""
        if self._snapshot is not None:
            self._snapshot.start()
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end, well or not."""
        self._thread.join()

    def wait(self) -> Published:
        """Wait for its end; any rank may, also beside training.

        Raises:
            PublishError: the engine was not given these weights.
        """
        self._thread.join()
        if self.published is None:
            raise PublishError(f"version {self.version} was not published: {self.problem}")
        return self.published

    def wait_copied(self) -> None:
        """Before anything writes what is published. Gives the publish up where the copies cannot be had in time."""
        if self._snapshot is not None and not self._snapshot.wait_copied(self._patience):
            self.give_up(f"the snapshot took more than {self._patience:g} s")

    def give_up(self, why: str) -> None:
        """End it: copy no more, and serve no more."""
        if self._snapshot is not None:
            self._snapshot.give_up(why)
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        try:
            step_aside()
            self._publish()
        except SwitchAbortedError as abort:
            self.problem = str(abort)
        except Exception as error:  # noqa: BLE001 - a publish never ends a run
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self.give_up(self.problem or "it is over")
            self._keep()

    def _keep(self) -> None:
        """What stays for the next time: these weights, or, where they did not get there, those before."""
        before = self.base
        if self.published is not None:
            self.base = Base(version=self.version, copies=self._copies) if self._changes else None
        for kept in (before.copies if before else {}, self._copies):
            if self.base is None or kept is not self.base.copies:
                self._held.add(-nbytes_of(kept))
        self._copies, self._since, self._snapshot = {}, None, None

    def _publish(self) -> None:
        host, rate, _ = self._settings
        objection, told, drawn = self._objection, None, self._drawn
        try:
            if drawn is not None and objection is None:
                self._server = MessageServer(self._message, host, rate, step_aside)
                told = [self._server.url, self._known(), self._open(drawn)]
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        heard = self._ask("begin", told, objection)
        assert drawn is not None
        assert self._server is not None
        urls, served = [url for url, _, _ in heard], heard[0][2]
        if self.base is not None and all(known == self.base.version == served for _, known, _ in heard):
            self._since = self.base
        digests, objection = None, None
        try:
            digests = self._copied(drawn)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        shares = self._ask("copied", digests, objection)
        objection = None
        try:
            if self._rank == 0:
                self._drive(drawn, urls, _added(shares))
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        self._ask("served", None, objection)  # only then is all sent
        facts = [self._server.sent, drawn.predicted(changes=self._changes), self._held.peak]
        everyone = self._ask("told", facts, None)
        self.published = Published(
            version=self.version,
            base=None if self._since is None else self._since.version,
            nbytes=sum(sent for sent, _, _ in everyone),
            seconds=time.perf_counter() - self._began,
            predicted=tuple(predicted for _, predicted, _ in everyone),
            measured=tuple(measured for _, _, measured in everyone),
        )

    def _known(self) -> int | None:
        """The version of which this rank could send changes."""
        return None if self.base is None else self.base.version

    def _open(self, drawn: Drawn) -> int | None:
        """On rank 0: have the plan judged, and begin with the engine; the version that it serves, if it says so."""
        if self._rank:
            return None
        drawn.judge()
        engine = drawn.publication.engine
        if self._greet:
            shapes = {str(rank): engine.local_shapes(rank) for rank in engine.ranks}
            self._client.init_weight_transfer_engine({"dtype": engine.dtype, "shapes": shapes})
        served = self._client.start_weight_update().get("weight_version")
        return served if isinstance(served, int) else None

    def _copied(self, drawn: Drawn) -> dict[str, dict[str, int]]:
        """Wait for the copies; this rank's share in the digest of each tensor of each rank of the engine."""
        assert self._snapshot is not None
        for key in drawn.copies:
            self._copies[key] = self._snapshot.take(_label(key))
        shares: dict[str, dict[str, int]] = {}
        known: dict[tuple[Key, Any], int] = {}
        for of_round in drawn.rounds:
            for rank, its in of_round.items():
                for one in its:
                    key = _key(one)
                    if (key, one.place) not in known:  # replicas have it in the same place
                        known[key, one.place] = digest_piece(self._copies[key], one.place)
                    of_rank = shares.setdefault(str(rank), {})
                    of_rank[one.tensor] = (of_rank.get(one.tensor, 0) + known[key, one.place]) % MODULUS
        return shares

    @contextmanager
    def _message(self, number: int, rank: int) -> Iterator[list[memoryview]]:
        """One message, while it is being sent."""
        assert self._drawn is not None
        before = None if self._since is None else self._since.copies
        contents = [
            Content(one.tensor, one.place, self._copies[key := _key(one)], None if before is None else before[key])
            for one in self._drawn.rounds[number][rank]
        ]
        made = message(contents, self.version, None if self._since is None else self._since.version)
        self._held.add(made.made)
        try:
            yield made.stretches
        finally:
            self._held.add(-made.made)

    def _drive(self, drawn: Drawn, urls: list[str], digests: Mapping[str, Mapping[str, str]]) -> None:
        """The engine's calls. It serves the old version until all of the new one has come and was found right."""
        engine, deadline = drawn.publication.engine, time.monotonic() + self._settings[2]
        shapes = engine.whole_shapes()
        for number, of_round in enumerate(drawn.senders):
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes more than {self._settings[2]:g} s")
            names = _names(drawn.publication, number)
            info = {
                "weight_version": self.version,
                "base_version": None if self._since is None else self._since.version,
                "names": names,
                "dtype_names": [engine.dtype_of(name) for name in names],
                "shapes": [shapes[name] for name in names],
                "messages": {
                    str(rank): [f"{urls[sender]}/{number}/{rank}" for sender in senders]
                    for rank, senders in of_round.items()
                },
            }
            if number + 1 == len(drawn.senders):  # what follows hands nothing but the version on
                info["digests"] = digests
            self._client.update_weights(info)
        # Only now: what came is a second copy, and generation need not wait for it.
        self._client.pause_generation()
        try:
            self._client.finish_weight_update({"weight_version": str(self.version)})
        finally:
            self._client.resume_generation()

    def _ask(self, what: str, payload: Any, objection: Objection | None) -> list[Any]:
        topic = f"{self._topic}/{what}"
        wait = self._settings[2] + self._patience
        return exchange(self._board, topic, self._rank, payload=payload, objection=objection, timeout=wait).in_order()


def _added(shares: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, str]]:
    """Digests as 16 hexadecimal digits, out of all ranks' shares."""
    sums: dict[str, dict[str, int]] = {}
    for of_rank in shares:
        for rank, its in of_rank.items():
            for name, share in its.items():
                held = sums.setdefault(rank, {})
                held[name] = (held.get(name, 0) + share) % MODULUS
    return {rank: {name: f"{value:016x}" for name, value in its.items()} for rank, its in sums.items()}


def _names(publication: Publication, number: int) -> list[str]:
    """The engine's tensors of which something comes in a round."""
    logical = {publication.engine.catalogue[index].name for index, _ in publication.schedule.rounds[number]}
    return [
        tensor.name for tensor in publication.engine.tensors if any(one.tensor in logical for one in tensor.components)
    ]


def _key(delivery: Delivery) -> Key:
    return delivery.move.tensor, delivery.move.box


def _label(key: Key) -> str:
    return f"{key[0]} {key[1]}"
