"""One switch as one rank takes part in it: from the announcement to the commit or the abort.

``build`` and ``warm`` run in a thread while the old world trains; ``quiesce`` and ``move`` stop the training thread at
a step edge; ``check`` runs in a thread again, beside the new layout's first forward and backward, which write no
parameter and no moment; ``commit`` is one agreed decision at the first optimizer step. Until then the old world is
whole (``keep``), or can be carried back (``tight``).

Whatever goes wrong on one rank is told to all before any of them acts on it: every phase ends in a question on the
board, never in a collective, which would hang with the rank that is missing.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dynatrain.execute.census import DigestReport
from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pages import touch
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.rounds import Executor
from dynatrain.execute.transport import Transport
from dynatrain.layout.layout import Layout
from dynatrain.plan.plan import Granule, Schedule
from dynatrain.space.box import shape_of
from dynatrain.space.tensor import State
from dynatrain.train.agreement import (
    Objection,
    SwitchAbortedError,
    SwitchFailedError,
    exchange,
    objection_of,
    words_of,
)
from dynatrain.train.blueprint import Blueprint, draw
from dynatrain.train.groups import GroupPool
from dynatrain.train.handover import RoundVotes, carry_back
from dynatrain.train.install import (
    bind,
    check_carried,
    make_world,
    match_catalogue,
    quiesce,
    read_reports,
    remember,
    report,
    unbind,
)
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.proof import Proof
from dynatrain.train.registered import common, require_equal
from dynatrain.train.retire import retire
from dynatrain.train.streams import Streams
from dynatrain.train.world import World


@dataclass(slots=True)
class Attempt:
    """See the module's text. The training thread calls; ``_prepare`` and ``_check`` are the threads' bodies.

    Attributes:
        party: this rank's means.
        order: what was agreed.
        target: the layout.
        old: the world that trains.
        new: the world to come, once built.
        blueprint: the judged plan.
        seconds: how long each phase took on this rank.
        problem: why this rank cannot begin; empty while it can.
        began: when it was started, in seconds of the monotonic clock.
    """

    party: Party
    order: Order
    target: Layout
    old: World
    new: World | None = None
    blueprint: Blueprint | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    began: float = 0.0
    _groups: GroupPool = field(init=False)
    _given_up: bool = False
    _collects: bool = False
    _moves: Exchange | None = None
    _targets: Pieces = field(default_factory=dict)
    _executor: Executor | None = None
    _proof: Proof | None = None
    _old_pieces: Pieces = field(default_factory=dict)
    _new_pieces: Pieces = field(default_factory=dict)
    _before_step: dict[Granule, torch.Tensor] = field(default_factory=dict)
    _object_states: dict[str, Any] | None = None
    _streams: Streams | None = None
    _thread: threading.Thread | None = None
    _objection: Objection | None = None

    def __post_init__(self) -> None:
        self._groups = self.party.groups.draft(self.order.number, self.party.deadline)

    # In the background, while the old world trains.

    def start(self) -> None:
        """Begin ``build`` and ``warm`` in a thread."""
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._prepare, name=f"switch-{self.order.number}", daemon=True)
        self._thread.start()

    @property
    def prepared(self) -> bool:
        """Whether the thread has ended, with or without a problem."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for the thread, at most that long."""
        assert self._thread is not None
        self._thread.join(max(0.0, seconds))

    def _prepare(self) -> None:
        try:
            with self._timed("build"):
                self._build()
            with self._timed("warm"):
                self._warm()
            if self.seconds["warm"] > self.party.deadline:
                raise TimeoutError(f"warm took {self.seconds['warm']:.1f} s, the deadline is {self.party.deadline:g} s")
        except SwitchAbortedError as abort:
            self.problem = str(abort)
        except Exception as error:
            self.problem = f"rank {self.party.rank}: {words_of(error)}"

    def _build(self) -> None:
        objection, payload = None, None
        try:
            self._at("build")
            self.new = make_world(self.party, self._groups, self.target, on_meta=True)
            states = {name: (State(e.kind, _dtype(e.value)),) for name, e in self.new.found.items()}
            payload = report(self.new, states, self.party.rank)
        except Exception as problem:
            objection = objection_of(problem)
        told = self._exchange("build", payload, objection)
        catalogue, ownership = read_reports(told, self.target)
        if problems := match_catalogue(self.old, catalogue):
            raise SwitchAbortedError("; ".join(problems))
        assert self.new is not None
        self.new.catalogue, self.new.ownership = self.old.catalogue, ownership
        self.blueprint = draw(self.party, self.order.mode, self.old, self.new, f"s{self.order.number}/plan")
        assert self.old.ownership is not None
        self._proof = Proof(catalogue=self.old.catalogue, old=self.old.ownership, new=ownership, rank=self.party.rank)

    def _warm(self) -> None:
        self._at("warm")
        self._group("check")
        self._moves = Exchange(
            plan=self._blueprint.part,
            catalogue=self.old.catalogue,
            transport=self._transport("moves"),
            pool=self.party.memory,
        )
        self._moves.warm()
        if self._schedule.mode == "keep":
            adopted = frozenset(self._blueprint.part.adopted)
            for granules in self._schedule.rounds:
                for granule in granules:
                    if self._given_up:
                        return
                    if granule not in adopted and (piece := self._allocate(granule)) is not None:
                        self._targets[granule] = piece
            # Only now: neighbours that were touched one by one would not share huge pages.
            for piece in self._targets.values():
                touch(piece.tensor)

    def _allocate(self, granule: Granule) -> Piece | None:
        """This rank's new piece of a granule: storage of its own, padded as FSDP2 pads."""
        tensor, state = self.old.catalogue[granule[0]], self.old.catalogue[granule[0]].states[granule[1]]
        assert self.new is not None
        assert self.new.ownership is not None
        entry = self.new.found.get(tensor.name)
        if entry is None:
            return None
        dtype = getattr(torch, state.dtype)
        box = () if state.scalar else self.new.ownership.box(tensor, self.party.rank)
        assert box is not None
        stored = entry.stored * dtype.itemsize if state.name == "param" else 0
        return Piece(self.party.memory.allocate(shape_of(box), dtype, stored), box)

    # At the step edge.

    def move(self) -> None:
        """Carry the state into the new world and bind it; on return the new world is to be trained, provisionally.

        Raises:
            SwitchAbortedError: the old world stands, as it was.
            SwitchFailedError: neither world can be had.
        """
        # Nothing is collected until the switch has ended: one collection takes longer than a small move.
        self._collects = gc.isenabled()
        gc.disable()
        self.party.memory.peak = max(self.party.memory.peak, self.party.memory.held)
        try:
            with self._timed("quiesce"):
                self._quiesce()
            with self._timed("move"):
                self._run()
        except SwitchAbortedError as abort:
            self.undo(str(abort))
            raise

    def _quiesce(self) -> None:
        objection, facts = None, {}
        try:
            self._at("quiesce")
            facts = common(self.old)
            check_carried(self.old, self.target)
            quiesce(self.old)
            now, planned = self.old.states(), {tensor.name: tensor.states for tensor in self.old.catalogue}
            if changed := sorted(name for name, states in now.items() if planned[name] != states):
                raise SwitchAbortedError(f"the states of {', '.join(changed)} are not those at the start")
            self._old_pieces = self.old.pieces(self.party.rank, self.party.device)
            if self._tight:
                self._refuse_pinned()
                self._proved.note(self._old_pieces)
        except Exception as problem:
            objection = objection_of(problem)
        require_equal(self._exchange("quiesce", facts, objection))

    def _refuse_pinned(self) -> None:
        if pinned := sorted(
            {self.old.catalogue[tensor].name for (tensor, _), p in self._old_pieces.items() if p.pinned}
        ):
            raise SwitchAbortedError(
                f"tight mode gives storage up, and that of {', '.join(pinned)} is shared with numpy or another process "
                "(Tensor.numpy(), share_memory_()): give those a clone, or use mode keep"
            )

    def _run(self) -> None:
        objection = None
        assert self._moves is not None
        transport = self._moves.transport
        votes = RoundVotes(self._exchange, "forth", len(self._schedule.rounds) if self._tight else 0)
        try:
            self._at("move")
            if self._tight and (unequal := self._proved.unequal(self._old_pieces, self._group("check"))):
                raise SwitchAbortedError(unequal)
            self._executor = self._make_executor(self._moves, votes)
            self._executor.run(self.party.deadline)
            assert self.new is not None
            self._object_states = remember(self.party, self.old)
            bind(self.party, self.old, self.new, self._executor.new)
            self._at("bound", len(self._schedule.rounds))
        except Exception as problem:
            objection = objection_of(problem)
            transport.close()
            votes.excuse(problem, objection)
        self._exchange("moved", None, objection)

    def _make_executor(self, moves: Exchange, votes: RoundVotes) -> Executor:
        return Executor(
            exchange=moves,
            old=self._old_pieces,
            target=self._allocate if self._tight else self._targets.get,
            agree=votes.agree,
            hook=self._at,
        )

    # Beside the new layout's first forward and backward.

    def start_check(self) -> None:
        """Begin to compare full digests, before against after, in a thread."""
        self._streams = Streams.read(self.party.device)
        try:
            assert self.new is not None
            self._new_pieces = self.new.pieces(self.party.rank, self.party.device)
            # The step writes buffers: they are digested, and if need be brought back, as they were before it.
            self._keep_values(self._new_pieces, self._is_buffer)
        except Exception as problem:
            self._objection = objection_of(problem)
        self._thread = threading.Thread(target=self._check, name=f"check-{self.order.number}", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        try:
            with self._timed("check"):
                after = self._digest_after()
                self._exchange("check", None, self._objection)
                old = None if self._tight else self._old_pieces
                new = self._as_moved(self._new_pieces)
                if wrong := self._proved.judge(after, old, new, self._group("check")):
                    self._objection = Objection(why=wrong, proven=True)
        except Exception as error:
            self._objection = objection_of(error)

    def _digest_after(self) -> torch.Tensor:
        after = torch.empty(0)
        try:
            self._at("check")
            self._proved.note(self._old_pieces)
            after = self._proved.after(self._as_moved(self._new_pieces))
        except Exception as problem:
            self._objection = self._objection or objection_of(problem)
        return after

    # At the first optimizer step.

    def settle(self) -> dict[int, Any]:
        """Agree to commit, and give the old world up.

        Returns:
            All ranks' measurements.

        Raises:
            SwitchAbortedError: at the next step edge call :meth:`undo`, then train the old world.
            SwitchFailedError: neither world can be had.
        """
        began = time.perf_counter()
        self.join(2 * self.party.deadline)
        objection = self._objection
        try:
            self._at("commit")
            if self._proved.report is None and objection is None:
                raise TimeoutError("the digests were not compared in time")
        except Exception as problem:
            objection = objection or objection_of(problem)
        try:
            told = self._exchange("commit", {"seconds": self.seconds, "peak": self.party.memory.peak}, objection)
        except SwitchAbortedError as abort:
            if self._tight and abort.proven:
                raise SwitchFailedError(f"{abort}; in tight mode the old state is gone") from abort
            if self._tight and self._executor is not None:
                # The rest of the doomed step may write registered objects, whose only copy is in the new world.
                self._keep_values(self._executor.new, self._is_of_object)
            raise
        self._commit()
        self.seconds["commit"] = time.perf_counter() - began
        return dict(enumerate(told))

    def _commit(self) -> None:
        assert self._executor is not None
        self._executor.release()
        self._groups.keep()
        self._retire(self.old, f"belongs to a layout that switch {self.order.number} to {self.order.layout} replaced")

    # Giving up.

    def give_up(self) -> None:
        """Free what ``build`` and ``warm`` made. Where their thread still runs, call it again once it has ended."""
        self._given_up = True
        self._groups.close()
        if self._moves is not None:
            self._moves.release()
        for piece in self._targets.values():
            self.party.memory.give_back(piece)
        self._targets.clear()

    def undo(self, why: str) -> None:
        """The old world again, as it was at the step edge, however far the attempt has come. On all ranks.

        Args:
            why: the reason of the abort.

        Raises:
            SwitchFailedError: in ``tight``, what was handed over cannot be brought back.
        """
        for purpose in ("moves", "check"):  # what broke may have broken them
            self._groups.discard(purpose, self.party.everyone)
        assert self.new is not None
        if self._tight:
            try:
                carry_back(
                    self.party,
                    self._exchange,
                    self._executor,
                    transport=lambda: self._transport("back"),
                    ends=(self.old, self.new),
                    proof=self._proved,
                    old_pieces=self._old_pieces,
                    written=self._before_step,
                )
            except SwitchAbortedError as error:
                raise SwitchFailedError(f"{why}; and the way back failed: {error}") from error
        if self._object_states is not None:
            unbind(self.old, self._object_states)
        if self._streams is not None:
            self._streams.restore(self.party.device)
            quiesce(self.new)
        self._retire(self.new, f"belongs to switch {self.order.number} to {self.order.layout}, which was aborted")
        if self._executor is not None:
            self._executor.abandon()
        self.give_up()

    def finish(self) -> None:
        """The attempt is over, one way or the other: the collector runs again if it did."""
        if self._collects:
            gc.enable()

    def _retire(self, world: World, why: str) -> None:
        made = {label: thing for label, thing in world.objects.items() if label in self.party.factories}
        retire(world.parts, world.optimizer, made, world.found, why)

    # Small things.

    @property
    def report(self) -> DigestReport | None:
        """The digests' verdict, once they were compared."""
        return self._proof.report if self._proof else None

    @property
    def _proved(self) -> Proof:
        assert self._proof is not None
        return self._proof

    @property
    def _blueprint(self) -> Blueprint:
        assert self.blueprint is not None
        return self.blueprint

    @property
    def _schedule(self) -> Schedule:
        return self._blueprint.part.schedule

    @property
    def _tight(self) -> bool:
        return self._schedule.mode == "tight"

    def _is_buffer(self, granule: Granule) -> bool:
        return self.old.catalogue[granule[0]].states[granule[1]].name == "buffer"

    def _is_of_object(self, granule: Granule) -> bool:
        label = self.old.catalogue[granule[0]].states[granule[1]].name.partition(".")[0]
        return label in self.old.objects

    def _keep_values(self, pieces: Pieces, which: Callable[[Granule], bool]) -> None:
        for granule, piece in pieces.items():
            if which(granule):
                self._before_step[granule] = piece.tensor.clone()

    def _as_moved(self, pieces: Pieces) -> Pieces:
        """The new pieces with the values that they had before the step began."""
        kept = {granule: Piece(tensor, pieces[granule].box) for granule, tensor in self._before_step.items()}
        return pieces | kept

    def _group(self, purpose: str) -> dist.ProcessGroup:
        return self._groups.get(
            purpose,
            self.party.everyone,
            backend="gloo" if purpose == "check" else "",
            timeout_seconds=self.party.deadline,
        )

    def _transport(self, purpose: str) -> Transport:
        return self.party.transport(self._group(purpose), self.party.everyone)

    def _exchange(self, what: str, payload: Any, objection: Objection | None = None) -> list[Any]:
        topic = f"s{self.order.number}/{what}"
        return exchange(
            self.party.board, topic, self.party.rank, payload=payload, objection=objection, timeout=self.party.deadline
        ).in_order()

    def _at(self, event: str, number: int = -1) -> None:
        self.party.hook(event, number, self.order.number)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - began


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
