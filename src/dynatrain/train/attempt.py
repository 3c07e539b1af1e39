"""One switch as one rank takes part in it: from the announcement to the commit or the abort.

``build`` and ``warm`` run in a thread while the old world trains; ``quiesce`` and ``move`` stop the training thread at
a step edge; ``check`` runs in a thread again, beside the new layout's first forward and backward, which write no
parameter and no moment; ``commit`` is one agreed decision at the first optimizer step. Until then the old world is
whole (``keep``), or can be carried back (``tight``).
"""

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dynatrain.execute.census import DigestReport, compare, digest_vector
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.rounds import Executor, backward
from dynatrain.layout.layout import Layout
from dynatrain.plan.build import rank_plan
from dynatrain.plan.plan import Granule, Schedule
from dynatrain.space.box import shape_of
from dynatrain.space.tensor import State
from dynatrain.train.agreement import SwitchAbortedError, exchange
from dynatrain.train.blueprint import Blueprint, draw, may_adopt
from dynatrain.train.install import (
    bind,
    check_carried,
    make_world,
    match_catalogue,
    quiesce,
    read_reports,
    report,
    unbind,
)
from dynatrain.train.party import Party
from dynatrain.train.registered import common, require_equal
from dynatrain.train.retire import retire
from dynatrain.train.world import World


class SwitchFailedError(RuntimeError):
    """A switch in ``tight`` mode that could neither go on nor be carried back: the run must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks agreed to do next.

    Attributes:
        number: of the switch in this run, from 1.
        layout: target, as text.
        mode: ``keep``, ``tight`` or ``auto``.
        at: first step that is to run in the new layout; -1 for as soon as all are ready.
        verb: ``switch`` or ``stop``.
        by: who asked.
        request: number of the request on the board; -1 for none.
        request_id: its id, or empty.
    """

    number: int
    layout: str
    mode: str = "auto"
    at: int = -1
    verb: str = "switch"
    by: str = ""
    request: int = -1
    request_id: str = ""


@dataclass(slots=True)
class Attempt:
    """See the module's text. The training thread calls; ``prepare`` and ``_check`` are the threads' bodies.

    Attributes:
        party: this rank's means.
        order: what was agreed.
        target: the layout.
        old: the world that trains.
        new: the world to come, once built.
        blueprint: the judged plan.
        seconds: how long each phase took on this rank.
        problem: why this rank cannot begin; empty while it can.
        report: the digests' verdict, once checked.
    """

    party: Party
    order: Order
    target: Layout
    old: World
    new: World | None = None
    blueprint: Blueprint | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    report: DigestReport | None = None
    _targets: Pieces = field(default_factory=dict)
    _executor: Executor | None = None
    _before: torch.Tensor | None = None
    _old_pieces: Pieces = field(default_factory=dict)
    _new_pieces: Pieces = field(default_factory=dict)
    _object_states: dict[str, Any] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _check_error: str = ""

    # In the background, while the old world trains.

    def start(self) -> None:
        """Begin ``build`` and ``warm`` in a thread."""
        self._thread = threading.Thread(target=self._prepare, name=f"switch-{self.order.number}", daemon=True)
        self._thread.start()

    @property
    def prepared(self) -> bool:
        """Whether the thread has ended, with or without a problem."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread."""
        assert self._thread is not None
        self._thread.join()

    def _prepare(self) -> None:
        try:
            with self._timed("build"):
                self._build()
            with self._timed("warm"):
                self._warm()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is the switch's failure, never the run's
            self.problem = _text(error)

    def _build(self) -> None:
        error, payload = "", None
        try:
            self._at("build")
            self.new = make_world(self.party, self.target, on_meta=True)
            states = {name: (State(e.kind, _dtype(e.value)),) for name, e in self.new.found.items()}
            payload = report(self.new, states, self.party.rank)
        except Exception as problem:  # noqa: BLE001 - told to all ranks, which then give up together
            error = _text(problem)
        told = self._exchange("build", payload, error)
        catalogue, ownership = read_reports(told, self.target)
        if problems := match_catalogue(self.old, catalogue):
            raise SwitchAbortedError("; ".join(problems))
        assert self.new is not None
        self.new.catalogue, self.new.ownership = self.old.catalogue, ownership
        self.blueprint = draw(self.party, self.order.mode, self.old, self.new, f"s{self.order.number}/plan")

    def _warm(self) -> None:
        self._at("warm")
        self.party.groups.get("check", self.party.everyone, backend="gloo")
        self._moves_group()
        if self._schedule.mode == "keep":
            adopted = frozenset(self._blueprint.part.adopted)
            for granules in self._schedule.rounds:
                for granule in granules:
                    if granule not in adopted and (piece := self._allocate(granule)) is not None:
                        self._targets[granule] = piece
        gc.freeze()

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
        assert self.new is not None
        gc.disable()
        self.party.memory.peak = max(self.party.memory.peak, self.party.memory.held)
        try:
            with self._timed("quiesce"):
                self._quiesce()
            with self._timed("move"):
                self._run()
        finally:
            gc.enable()

    def _quiesce(self) -> None:
        self._at("quiesce")
        error, facts = "", {}
        try:
            facts = common(self.old)
            check_carried(self.old, self.target)
            quiesce(self.old)
            now, planned = self.old.states(), {tensor.name: tensor.states for tensor in self.old.catalogue}
            if changed := sorted(name for name, states in now.items() if planned[name] != states):
                error = f"the states of {', '.join(changed)} are not those at the start"
            self._old_pieces = self.old.pieces(self.party.rank, self.party.device)
            if self._schedule.mode == "tight":
                self._before = self._digest(self._old_pieces, self.old)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            error = _text(problem)
        try:
            require_equal(self._exchange("quiesce", facts, error))
        except SwitchAbortedError:
            self._drop_targets()
            raise

    def _run(self) -> None:
        self._at("move")
        error = ""
        try:
            self._executor = self._make_executor()
            self._executor.run(self.party.deadline)
            assert self.new is not None
            self._object_states = bind(self.party, self.old, self.new, self._executor.new)
            self.party.hook("bound", len(self._schedule.rounds))
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            error = _text(problem)
        try:
            self._exchange("moved", None, error)
        except SwitchAbortedError as abort:
            self._go_back(str(abort))
            raise

    def _make_executor(self) -> Executor:
        keep = self._schedule.mode == "keep"
        return Executor(
            plan=self._blueprint.part,
            catalogue=self.old.catalogue,
            old=self._old_pieces,
            target=self._targets.get if keep else self._allocate,
            transport=self.party.transport(self._moves_group(), self.party.everyone),
            pool=self.party.memory,
            agree=(lambda _round: True) if keep else self._agree_round("forth"),
            hook=self.party.hook,
        )

    def _agree_round(self, way: str) -> Callable[[int], bool]:
        def agree(number: int) -> bool:
            try:
                self._exchange(f"{way}{number}", None)
            except SwitchAbortedError:
                return False
            return True

        return agree

    def _moves_group(self) -> dist.ProcessGroup:
        return self.party.groups.get("moves", self.party.everyone, timeout_seconds=self.party.deadline)

    # Beside the new layout's first forward and backward.

    def start_check(self) -> None:
        """Begin to compare full digests, before against after, in a thread."""
        assert self.new is not None
        # The step writes buffers while the thread reads: they are digested as they were before it.
        self._new_pieces = {
            granule: Piece(piece.tensor.clone(), piece.box) if self._is_buffer(granule) else piece
            for granule, piece in self.new.pieces(self.party.rank, self.party.device).items()
        }
        self._thread = threading.Thread(target=self._check, name=f"check-{self.order.number}", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        try:
            self._at("check")
            with self._timed("check"):
                assert self.new is not None
                if self._before is None:
                    self._before = self._digest(self._old_pieces, self.old)
                after = self._digest(self._new_pieces, self.new)
                both = torch.cat([self._before, after])
                dist.all_reduce(both, group=self.party.groups.get("check", self.party.everyone, backend="gloo"))
                before, after = both[: len(self._before)], both[len(self._before) :]
                owners = (self.old.ownership, self.new.ownership)
                self.report = compare(before, after, self.old.catalogue, *owners)
        except Exception as error:  # noqa: BLE001 - told to all ranks at the commit
            self._check_error = _text(error)

    def _digest(self, pieces: Pieces, world: World) -> torch.Tensor:
        assert self.new is not None
        assert world.ownership is not None
        assert self.new.ownership is not None
        return digest_vector(pieces, self.old.catalogue, world.ownership, self.new.ownership, self.party.rank)

    # At the first optimizer step.

    def settle(self, facts: dict[str, Any]) -> dict[int, Any]:
        """Agree to commit, and give the old world up; or carry it back.

        Args:
            facts: this rank's measurements, told to all.

        Returns:
            All ranks' measurements.

        Raises:
            SwitchAbortedError: the old world stands, as it was; call :meth:`undo`, then train it.
            SwitchFailedError: neither world can be had.
        """
        began = time.perf_counter()
        self.join()
        self._at("commit")
        error = self._check_error or _difference(self.report)
        try:
            told = exchange(
                self.party.board,
                f"s{self.order.number}/commit",
                self.party.rank,
                payload=facts | {"seconds": self.seconds, "peak": self.party.memory.peak},
                error=error,
                timeout=self.party.deadline,
            )
        except SwitchAbortedError as abort:
            if self._schedule.mode == "tight":
                raise SwitchFailedError(f"{abort}; in tight mode the old state is gone") from abort
            raise
        self._commit()
        self.seconds["commit"] = time.perf_counter() - began
        return told.payloads

    def _commit(self) -> None:
        assert self._executor is not None
        self._executor.release()
        retired = {label: thing for label, thing in self.old.objects.items() if label in self.party.factories}
        why = f"belongs to a layout that switch {self.order.number} to {self.order.layout} replaced"
        retire(self.old.parts, self.old.optimizer, retired, self.old.found, why)

    # Giving up.

    def undo(self) -> None:
        """After an abort in ``keep``: registered objects take back what they held, new storage is freed."""
        self.party.groups.discard("check", self.party.everyone)
        unbind(self.old, self._object_states)
        if self._executor is not None:
            self._executor.abandon()

    def give_up(self) -> None:
        """Before the move: free what ``warm`` allocated."""
        self._drop_targets()

    def _drop_targets(self) -> None:
        for piece in self._targets.values():
            self.party.memory.give_back(piece)
        self._targets.clear()

    def _go_back(self, why: str) -> None:
        """Undo a move that did not arrive everywhere."""
        self.party.groups.discard("moves", self.party.everyone)
        if self._executor is None:
            self._drop_targets()
            return
        if self._schedule.mode == "keep":
            self.undo()
            return
        try:
            told = self._exchange("back", self._executor.journal.agreed)
            agreed = max(told)
            reverse = rank_plan(
                self.old.catalogue,
                self._new_ownership,
                self._old_ownership,
                self.party.rank,
                backward(self._schedule, agreed),
                ranks_per_node=self.party.ranks_per_node,
                adoptable=may_adopt(self.old, self._new_ownership),
            )
            way = self._executor.way_back(
                plan=reverse,
                transport=self.party.transport(self._moves_group(), self.party.everyone),
                agreed=agreed,
            )
            unbind(self.old, self._object_states)
            way.run(self.party.deadline)
            way.release()
        except Exception as error:
            raise SwitchFailedError(f"{why}; and the way back failed: {_text(error)}") from error

    # Small things.

    def _is_buffer(self, granule: Granule) -> bool:
        return self.old.catalogue[granule[0]].states[granule[1]].name == "buffer"

    @property
    def _blueprint(self) -> Blueprint:
        assert self.blueprint is not None
        return self.blueprint

    @property
    def _schedule(self) -> Schedule:
        return self._blueprint.part.schedule

    @property
    def _new_ownership(self) -> Any:
        assert self.new is not None
        return self.new.ownership

    @property
    def _old_ownership(self) -> Any:
        return self.old.ownership

    def _exchange(self, what: str, payload: Any, error: str = "") -> list[Any]:
        topic = f"s{self.order.number}/{what}"
        return exchange(
            self.party.board, topic, self.party.rank, payload=payload, error=error, timeout=self.party.deadline
        ).in_order()

    def _at(self, phase: str) -> None:
        self.party.hook(phase, -1)

    def _timed(self, phase: str) -> "_Timer":
        return _Timer(self.seconds, phase)


class _Timer:
    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = time.perf_counter() - self._began


def _difference(report: DigestReport | None) -> str:
    if report is None:
        return "the digests were not compared"
    found = [f"{d.tensor} {d.state} on rank {d.rank} in {d.box}" for d in report.differing]
    found += [f"copy {copy} of {tensor} {state} differed before the switch" for tensor, state, copy in report.unequal]
    return "digests differ: " + "; ".join(found[:8]) if found else ""


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, SwitchAbortedError) else f"{type(error).__name__}: {error}"
