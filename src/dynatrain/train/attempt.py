"""One switch as one rank takes part in it: from the announcement to the commit or the abort.

``build`` and ``warm`` run in a thread while the old world trains; ``quiesce`` and ``move`` stop the training thread at
a step edge; ``check`` runs in a thread again, beside the new layout's first forward and backward, which write no
parameter and no moment; ``commit`` is one agreed decision at the first optimizer step. Until then the old world is
whole (``keep``), or can be carried back (``tight``). A switch inside a step is the same between two parts of it, with
the gradients that the first part has accumulated among the states.

Whatever goes wrong on one rank is told to all before any of them acts on it: every phase ends in a question on the
board, never in a collective, which would hang with the rank that is missing.
"""

import gc
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dynatrain.execute.census import DigestReport
from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pages import give_up_spare, touch
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.rounds import Executor
from dynatrain.layout.layout import Layout
from dynatrain.plan.plan import Granule, Schedule
from dynatrain.train.agreement import SwitchAbortedError, SwitchFailedError, objection_of, words_of
from dynatrain.train.blueprint import Blueprint, draw
from dynatrain.train.channel import Channel
from dynatrain.train.check import Check
from dynatrain.train.compiled import compile_seconds
from dynatrain.train.copies import settle_copies
from dynatrain.train.gradients import forget, give, inside, with_gradients
from dynatrain.train.handover import RoundVotes, carry_back
from dynatrain.train.install import (
    Shared,
    allocate,
    bind,
    leaf_values,
    make_world,
    match_catalogue,
    quiesce,
    read_reports,
    remember,
    report,
    retire_world,
    unbind,
    values_alone,
)
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.proof import Proof
from dynatrain.train.quiet import agree_on, facts_of, stand_still
from dynatrain.train.saved import Saved
from dynatrain.train.streams import Streams
from dynatrain.train.world import World


@dataclass(slots=True)
class Attempt:
    """See the module's text. The training thread calls; ``_prepare`` is the body of a thread.

    Attributes:
        party: this rank's means.
        order: what was agreed.
        target: the layout.
        old: the world that trains; for a switch inside a step a view of it, with gradients among its states.
        new: the world to come, once built.
        blueprint: the judged plan.
        problem: why this rank cannot begin; empty while it can.
        began: when it was started, in seconds of the monotonic clock.
    """

    party: Party
    order: Order
    target: Layout
    old: World
    new: World | None = None
    blueprint: Blueprint | None = None
    problem: str = ""
    began: float = 0.0
    _channel: Channel = field(init=False)
    _saved: Saved = field(init=False)
    _given_up: bool = False
    _bound: bool = False
    _staging: int = 0
    _collects: bool = False
    _moves: Exchange | None = None
    _targets: Pieces = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _executor: Executor | None = None
    _proof: Proof | None = None
    _old_pieces: Pieces = field(default_factory=dict)
    _object_states: dict[str, Any] | None = None
    _old_leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    _streams: Streams | None = None
    _compiled: float = 0.0
    _thread: threading.Thread | None = None
    _check: Check | None = None

    def __post_init__(self) -> None:
        self._channel = Channel(self.party, self.order.number)

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
            with self._channel.timed("build"):
                self._build()
            with self._channel.timed("warm"):
                self._warm()
            if self.seconds["warm"] > self.party.deadline:
                raise TimeoutError(f"warm took {self.seconds['warm']:.1f} s, the deadline is {self.party.deadline:g} s")
        except SwitchAbortedError as abort:
            self.problem = str(abort)
        except Exception as error:  # noqa: BLE001 - told to all ranks
            self.problem = f"rank {self.party.rank}: {words_of(error)}"

    def _build(self) -> None:
        objection, payload = None, None
        try:
            self._channel.at("build")
            self.new = make_world(self.party, self._channel.groups, self.target, on_meta=True)
            states = values_alone(self.new)
            if self.order.after:
                states = with_gradients(states, self.new)
            payload = report(self.new, states, self.party.rank)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        told = self._channel.ask("build", payload, objection, self.party.patience)
        catalogue, ownership = read_reports(told, self.target)
        if problems := match_catalogue(self.old, catalogue):
            raise SwitchAbortedError("; ".join(problems))
        assert self.new is not None
        if self.order.after:
            self.old = inside(self.old, catalogue)
        self._saved = Saved(self.old)
        self.new.catalogue, self.new.ownership = self.old.catalogue, ownership
        self.blueprint = draw(self.party, self.order.mode, self.old, self.new, f"s{self.order.number}/plan")
        assert self.old.ownership is not None
        self._proof = Proof(catalogue=self.old.catalogue, old=self.old.ownership, new=ownership, rank=self.party.rank)

    def _warm(self) -> None:
        self._channel.at("warm")
        self.party.memory.peak = self.party.memory.held  # from here on it is this switch's
        self._channel.group("check")
        assert self.blueprint is not None
        part, transport = self.blueprint.part, self._channel.transport("moves")
        self._moves = Exchange(plan=part, catalogue=self.old.catalogue, transport=transport, pool=self.party.memory)
        self._staging = self._moves.warm()
        if not self._tight:
            adopted = frozenset(part.adopted)
            for granule in itertools.chain(*part.schedule.rounds):
                if self._given_up:
                    return
                if granule not in adopted and (piece := self._allocate(granule)) is not None:
                    self._targets[granule] = piece
            # Only now: neighbours that were touched one by one would not share huge pages.
            for piece in self._targets.values():
                touch(piece.tensor)

    def _allocate(self, granule: Granule) -> Piece | None:
        assert self.new is not None
        return allocate(self.party, self.old, self.new, granule, self._shared)

    # At the step edge, or inside a step.

    def move(self) -> None:
        """Carry the state into the new world and bind it; on return the new world is to be trained, provisionally.

        Raises:
            SwitchAbortedError: the old world stands, as it was.
            SwitchFailedError: neither world can be had.
        """
        # Nothing is collected until the switch has ended: one collection takes longer than a small move.
        self._collects = gc.isenabled()
        gc.disable()
        try:
            with self._channel.timed("quiesce"):
                self._quiesce()
            with self._channel.timed("move"):
                self._run()
        except SwitchAbortedError as abort:
            self.undo(str(abort))
            raise

    def _quiesce(self) -> None:
        objection, facts = None, None
        assert self.new is not None
        try:
            self._channel.at("quiesce")
            self._old_pieces = stand_still(
                self.party, self.old, self.target, inside=bool(self.order.after), gives_up=self._tight
            )
            facts = facts_of(self.party, self.old, self.new)
            if self._compares_first:
                self._proved.note(self._old_pieces)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        agree_on(self.party, self._channel.ask("quiesce", facts, objection), self.old, self.new)

    def _run(self) -> None:
        objection = None
        assert self._moves is not None
        transport = self._moves.transport
        votes = RoundVotes(self._channel.ask, "forth", len(self._schedule.rounds) if self._tight else 0)
        try:
            self._channel.at("move")
            if self._compares_first:
                group, party = self._channel.group("check"), self.party
                settle_copies(self._proved, self._moves, self._old_pieces, group, party.unequal_copies, party.deadline)
            self._executor = Executor(
                exchange=self._moves,
                old=self._old_pieces,
                target=self._allocate if self._tight else self._targets.get,
                agree=votes.agree,
                hook=self._channel.at,
            )
            self._executor.run(self.party.deadline)
            assert self.new is not None
            self._object_states = remember(self.party, self.old)
            self._old_leaves = leaf_values(self.old)
            bind(self.party, self.old, self.new, self._executor.new)
            self._bound = True
            self._channel.at("bound", len(self._schedule.rounds))
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
            transport.close()
            votes.excuse(problem, objection)
        self._channel.ask("moved", None, objection)

    # Beside the new layout's first forward and backward.

    def start_check(self) -> None:
        """Begin to compare full digests, before against after, in a thread."""
        self._streams = Streams.read(self.party.device)
        self._compiled = compile_seconds()
        assert self.new is not None
        self._check = Check(self._channel, self._proved, self._saved, keeps_old=not self._tight)
        self._check.start(self._old_pieces, self.new)

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
        assert self._check is not None
        objection = self._check.outcome(2 * self.party.deadline)
        try:
            self._channel.at("commit")
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection or objection_of(problem)
        try:
            self.seconds["compile"] = compile_seconds() - self._compiled
            facts = {"seconds": self.seconds, "peak": self.party.memory.peak, "staging": self._staging}
            told = self._channel.ask("commit", facts, objection)
        except SwitchAbortedError as abort:
            if self._tight and abort.proven:
                raise SwitchFailedError(f"{abort}; in tight mode the old state is gone") from abort
            if self._tight and self._executor is not None:
                # The rest of the doomed step may write registered objects, whose only copy is in the new world.
                self._saved.keep_objects(self._executor.new)
            raise
        self._commit()
        self.seconds["commit"] = time.perf_counter() - began
        return dict(enumerate(told))

    def _commit(self) -> None:
        assert self._executor is not None
        self._executor.release()
        assert self.new is not None
        forget(self.party, self.new)
        self._channel.groups.keep()
        replaced = f"belongs to a layout that switch {self.order.number} to {self.order.layout} replaced"
        retire_world(self.party, self.old, self._old_leaves, replaced)
        give_up_spare()

    # Giving up.

    def give_up(self) -> None:
        """Before the move: free what ``build`` and ``warm`` made. While their thread still writes, call it again."""
        self._given_up = True
        self._channel.groups.close()
        if self._thread is None or self.prepared:
            self._free()

    def _free(self) -> None:
        if self._moves is not None:
            self._moves.release()
        while self._targets:
            self.party.memory.give_back(self._targets.popitem()[1])

    def undo(self, why: str) -> None:
        """The old world again, as it was at :meth:`move`, however far the attempt has come. On all ranks.

        Args:
            why: the reason of the abort.

        Raises:
            SwitchFailedError: in ``tight``, what was handed over cannot be brought back.
        """
        for purpose in ("moves", "check"):  # what broke may have broken them
            self._channel.groups.discard(purpose, self.party.everyone)
        if self._check is not None and not self._check.end(2 * self.party.deadline):
            raise SwitchFailedError(f"{why}; and the digests' thread, which reads what would be freed, does not end")
        assert self.new is not None
        if self._tight:
            try:
                carry_back(
                    self.party,
                    self._channel.ask,
                    self._executor,
                    transport=lambda: self._channel.transport("back"),
                    ends=(self.old, self.new),
                    proof=self._proved,
                    old_pieces=self._old_pieces,
                    written=self._saved.values,
                )
            except SwitchAbortedError as error:
                raise SwitchFailedError(f"{why}; and the way back failed: {error}") from error
        new_leaves: dict[str, torch.Tensor] = {}
        if self._object_states is not None:
            new_leaves = leaf_values(self.new) if self._bound else {}
            unbind(self.old, self._object_states)
        if self._streams is not None:
            self._streams.restore(self.party.device)
            quiesce(self.new)
        if self._executor is not None:
            self._executor.abandon()
        give(self.old, self.old.gradients)
        forget(self.party, self.old)
        self._channel.groups.close()
        self._free()
        aborted = f"belongs to switch {self.order.number} to {self.order.layout}, which was aborted"
        retire_world(self.party, self.new, new_leaves, aborted)

    def finish(self) -> None:
        """The attempt is over, one way or the other: the collector runs again if it did."""
        if self._collects:
            gc.enable()

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase took on this rank."""
        return self._channel.seconds

    @property
    def report(self) -> DigestReport | None:
        """The digests' verdict, once they were compared."""
        return self._proof.report if self._proof else None

    @property
    def mended(self) -> int:
        """Copies of the old state that differed from copy 0 and were given its values."""
        return self._proof.mended if self._proof else 0

    @property
    def _compares_first(self) -> bool:
        """Whether copies are compared before anything is moved: in ``keep`` there is time for it beside the step."""
        return self._tight or self.party.unequal_copies == "owner"

    @property
    def _proved(self) -> Proof:
        assert self._proof is not None
        return self._proof

    @property
    def _schedule(self) -> Schedule:
        assert self.blueprint is not None
        return self.blueprint.part.schedule

    @property
    def _tight(self) -> bool:
        return self._schedule.mode == "tight"
