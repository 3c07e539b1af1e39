"""One switch as one rank takes part in it: from the announcement to the commit or the abort.

``build`` and ``warm`` run in a thread while the old world trains; ``quiesce`` and ``move`` stop the training thread at
a step edge; ``check`` runs in a thread again, beside the new layout's first forward and backward, which write no
parameter and no moment; ``commit`` is one agreed decision at the first optimizer step. Until then the old world is
whole (``keep``), or can be carried back (``tight``). A switch inside a step is the same between two parts of it, with
the gradients that the first part has accumulated among the states. In a crossing ``check`` and ``commit`` come before
the first step: a leaver has none, and a newcomer that died in it would take the others' step, and the run, with it.

Whatever goes wrong on one rank is told to all before any of them acts on it: every phase ends in a question on the
board, never in a collective, which would hang with the rank that is missing.
"""

import gc
import json
import time
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dynatrain.execute.census import DigestReport
from dynatrain.execute.pages import give_up_spare
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.rounds import Executor
from dynatrain.plan.left import Left
from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box
from dynatrain.train.account import Account, displaced, mismatches, take
from dynatrain.train.agreement import SwitchAbortedError, SwitchFailedError, objection_of
from dynatrain.train.announcement import NotAdmittedError
from dynatrain.train.check import Check
from dynatrain.train.compiled import compile_seconds
from dynatrain.train.copies import settle_copies
from dynatrain.train.extra_state import give_extra_states
from dynatrain.train.gradients import forget, give
from dynatrain.train.handover import RoundVotes, carry_back
from dynatrain.train.install import bind, leaf_values, quiesce, remember, retire_world, unbind
from dynatrain.train.module_settings import apply
from dynatrain.train.preparation import Preparation
from dynatrain.train.quiet import agree_on, facts_of, stand_still
from dynatrain.train.streams import Streams
from dynatrain.train.world import World

_ACCOUNT, _BOOKS = "account", "books"
"""What old rank 0 puts up at the step edge, on the board of a crossing."""

STARVED = "starved"
"""Key of why a crossing is given up at the edge at which it was to begin, on its board."""

_POLL_SECONDS = 0.005


@dataclass(slots=True, kw_only=True)
class Attempt(Preparation):
    """See the module's text. The training thread calls.

    Attributes:
        step: the next step, from :meth:`move` on.
        books: of a crossing, what whoever is rank 0 afterwards has to know; from :meth:`move` on.
    """

    step: int = -1
    books: dict[str, Any] = field(default_factory=dict)
    _bound: bool = False
    _collects: bool = False
    _executor: Executor | None = None
    _old_pieces: Pieces = field(default_factory=dict)
    _live_pieces: Pieces = field(default_factory=dict)
    _object_states: dict[str, Any] | None = None
    _old_leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    _streams: Streams | None = None
    _compiled: float = 0.0
    _check: Check | None = None

    # At the step edge, or inside a step.

    def move(self, step: int, books: dict[str, Any]) -> None:
        """Carry the state into the new world and bind it; on return the new world is to be trained, provisionally.

        Args:
            step: the next step; a newcomer is told it.
            books: what rank 0 knows beyond the state, as JSON has it; in a crossing it is told to all.

        Raises:
            SwitchAbortedError: the old world stands, as it was.
            SwitchFailedError: neither world can be had.
        """
        # Nothing is collected until the switch has ended: one collection takes longer than a small move.
        self._collects = gc.isenabled()
        gc.disable()
        self.step, self.books = step, books
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
            if self.way.crossing is not None and self.party.rank == 0:
                self._tell()
            self._live_pieces = self._old_pieces = stand_still(
                self.party, self.old, self.target, inside=bool(self.order.after), gives_up=self._tight
            )
            if self._goes_back:
                self._old_pieces = self.note.own if self.note is not None else {}
            if self.loss is not None:
                self._proved.stand_in(self.loss, self._old_pieces, self._kept)
            facts = facts_of(self.way, self.old, self.new)
            if self._compares_first:
                self._proved.note(self._old_pieces)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        agree_on(self.way, self._channel.ask("quiesce", facts, objection), self.old, self.new)
        if self.way.crossing is not None:
            self.books = json.loads(self.party.board.peek(_BOOKS) or "{}")

    def _tell(self) -> None:
        """Put up what newcomers, and a new rank 0, have to know.

        Raises:
            ValueError: a registered object's state could not be read by them.
        """
        account = Account.of(self.party, self.old, self.step)
        account.require_readable()
        self.party.board.post(_BOOKS, json.dumps(self.books))
        self.party.board.post(_ACCOUNT, account.to_text())

    def await_edge(self) -> int:
        """A newcomer's: say when this rank is warm, and return when the old ranks are at the step edge they agreed on.

        Returns:
            The edge.

        Raises:
            NotAdmittedError: they will not begin there.
        """
        way, board, told = self.way, self.party.board, False
        assert way.crossing is not None
        while (go := board.go_edge(way.crossing.generation)) is None:
            if self.prepared and not told:
                told = True
                if not self.problem:
                    way.say_warm()
            time.sleep(_POLL_SECONDS)
        if why := go.reason if go.edge < 0 else self._starved():
            self.give_up()
            raise NotAdmittedError(why)
        return go.edge

    def _starved(self) -> str:
        """Why the old ranks do not begin at their edge; empty when they do."""
        board = self.party.board
        while board.peek(_ACCOUNT) is None and not self._channel.decided("quiesce"):
            if (starved := board.peek(STARVED)) is not None:
                return starved
            time.sleep(_POLL_SECONDS)
        return ""

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
            if self._files is not None:
                self._files.fill(self._executor.new, self._fetches)
            assert self.new is not None
            self._object_states = remember(self.party, self.old)
            self._old_leaves = leaf_values(self.old)
            self._bind()
            self._bound = True
            self._channel.at("bound", len(self._schedule.rounds))
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
            transport.close()
            votes.excuse(problem, objection)
        self._channel.ask("moved", None, objection)

    def _bind(self) -> None:
        """What arrived becomes the new world, of which this rank is one from here on, unless it leaves."""
        assert self.new is not None
        assert self._executor is not None
        self.way.enter()
        if self.way.comes:
            self.new.write_back(self._executor.new)
            self._take_account(self.new)
        elif not self.way.leaves:
            bind(self.party, self.old, self.new, self._executor.new)
            if self._files is not None and self.way.after is not None:
                self._files.take_rest(self.new, self.way.after.rank, self.party.device)
            elif self.note is not None:
                self.note.take_rest(self.new, self.party.device)

    def _kept(self, owner: int, boxes: Mapping[Granule, Box]) -> Mapping[Granule, Piece]:
        """Pieces of the loss's step that this rank answers for and does not train with."""
        ward = self.wards.get(owner, {})
        rest = {granule: box for granule, box in boxes.items() if granule not in ward}
        found = {granule: ward[granule] for granule in boxes if granule in ward}
        if not rest:
            return found
        assert self._files is not None
        return ChainMap(found, self._files.pieces(rest))  # type: ignore[arg-type]  # each is read when it is asked for

    @property
    def _goes_back(self) -> bool:
        """Whether a loss has thrown the run back to an earlier step than that of the pieces that are trained with."""
        return self.loss is not None and not Left(self.loss).live

    def _take_account(self, new: World) -> None:
        account = Account.from_text(self.party.board.peek(_ACCOUNT) or "")
        if problems := (*mismatches(new, account.common, account.optimizers), *displaced(new, account.groups)):
            raise SwitchAbortedError("a newcomer is built otherwise than the run: " + "; ".join(problems))
        take(new, account.common, account.groups, account.optimizers)
        apply(new.parts, new.found, new.rule, new.built, new.changed)
        give_extra_states(new.owners, new.given)
        assert self.way.after is not None
        device, first = self.party.device, Streams.of(account.streams)
        first.of_new_rank(self.way.after.rank, account.step, device).restore(device)
        self.step = account.step

    # Beside the new layout's first forward and backward.

    def start_check(self) -> None:
        """Begin to compare full digests, before against after, in a thread."""
        self._streams = Streams.read(self.party.device)
        self._compiled = compile_seconds()
        assert self.new is not None
        assert self._moves is not None
        self._check = Check(self._channel, self._moves, self._proved, self._saved, keeps_old=not self._tight)
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
        if self._goes_back:
            for piece in self._live_pieces.values():
                self.party.memory.give_back(piece)
        else:
            self._executor.release()
        assert self.new is not None
        forget(self.party, self.new)
        self.way.commit(self.new)
        replaced = f"belongs to a layout that switch {self.order.number} to {self.order.layout} replaced"
        retire_world(self.party, self.old, self._old_leaves, replaced)
        give_up_spare()

    # Giving up.

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
        self.way.go_back()
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
        self.way.close()
        self._free()
        aborted = f"belongs to switch {self.order.number} to {self.order.layout}, which was aborted"
        retire_world(self.party, self.new, new_leaves, aborted)

    def finish(self) -> None:
        """The attempt is over, one way or the other: the collector runs again if it did."""
        if self._collects:
            gc.enable()

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
