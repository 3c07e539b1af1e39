"""A switch before its step edge: the next world is built, planned for and warmed while the present one trains.

In a crossing the same is done by ranks that are there in one of the worlds alone. A leaver's new world and a newcomer's
old one is a world of nothing, so that all take the same steps and answer the same questions.
"""

import gc
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pages import touch
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.layout.layout import Layout
from dynatrain.plan.plan import Fetch, Granule, Loss, Schedule
from dynatrain.space.ownership import Ownership
from dynatrain.train.adopt import adopt_ahead
from dynatrain.train.agreement import SwitchAbortedError, objection_of, words_of
from dynatrain.train.before_step import BeforeStep
from dynatrain.train.blueprint import Blueprint, draw
from dynatrain.train.channel import Channel
from dynatrain.train.files import Files
from dynatrain.train.gradients import inside, with_gradients
from dynatrain.train.install import (
    Shared,
    allocate,
    make_world,
    match_catalogue,
    other_states,
    read_reports,
    report,
    values_alone,
)
from dynatrain.train.keeping import Note
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.passage import Passage
from dynatrain.train.proof import Proof
from dynatrain.train.rehearsal import rehearse
from dynatrain.train.targets import require_reduced
from dynatrain.train.world import World, nothing


@dataclass(slots=True, kw_only=True)
class Preparation:
    """Phases ``build`` and ``warm``. The training thread starts them and asks; ``_prepare`` is the body of a thread.

    Attributes:
        way: who this rank is in it.
        order: what was agreed.
        target: the layout.
        old: the world that trains; for a switch inside a step a view of it, with gradients among its states.
        new: the world to come, once built; a newcomer has it from the start.
        blueprint: the judged plan.
        problem: why this rank cannot begin; empty while it can.
        began: when it was started, in seconds of the monotonic clock.
        held: of an order that stops here: bytes that each rank holds for the world to come.
        loss: of old ranks, and what is left; None where all are there.
        checkpoint: that a loss has thrown the run back to; None where it has not.
        note: this rank's own of the snapshot that a loss has thrown the run back to; likewise.
        wards: what it keeps of others, by their numbers here; likewise.
    """

    way: Passage
    order: Order
    target: Layout
    old: World
    new: World | None = None
    blueprint: Blueprint | None = None
    problem: str = ""
    began: float = 0.0
    held: tuple[int, ...] = ()
    loss: Loss | None = None
    checkpoint: Path | None = None
    note: Note | None = None
    wards: Mapping[int, Pieces] = field(default_factory=dict)
    _files: Files | None = None
    _fetches: tuple[Fetch, ...] = ()
    _channel: Channel = field(init=False)
    _saved: BeforeStep = field(init=False)
    _given_up: bool = False
    _staging: int = 0
    _moves: Exchange | None = None
    _live: Pieces = field(default_factory=dict)
    _targets: Pieces = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _proof: Proof | None = None
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        number = self.order.number
        # A crossing has a board of its own, where whoever leads the agents has to find its questions.
        topic = "crossing" if self.way.crossing is not None else f"s{number}"
        self._channel = Channel(self.way.party, number, self.way.groups, topic)

    @property
    def party(self) -> Party:
        """In whose numbers the switch counts: the ranks, or in a crossing the holders."""
        return self.way.party

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
            if self.way.crossing is not None:
                gc.collect()  # a world that was left is a cycle, and has sockets and threads as long as it is there
            with self._channel.timed("build"):
                self._build()
            with self._channel.timed("warm"):
                self._warm()
            if self.seconds["warm"] > self.party.deadline:
                raise TimeoutError(f"warm took {self.seconds['warm']:.1f} s, the deadline is {self.party.deadline:g} s")
            if self.order.verb == "prepare":
                mine = self._staging + sum(piece.nbytes for piece in self._targets.values())
                self.held = tuple(self._channel.ask("held", mine))
        except SwitchAbortedError as abort:
            self.problem = str(abort)
        except Exception as error:  # noqa: BLE001 - told to all ranks
            self.problem = f"rank {self.party.rank}: {words_of(error)}"
        if self.problem and self.way.crossing is not None:
            self.way.give_up(self.problem)

    def _build(self) -> None:
        objection, payload = None, None
        try:
            self._channel.at("build")
            payload = self._describe()
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        told = self._channel.ask("build", payload, objection, self.party.patience)
        catalogue, read = read_reports(self.way.of_new(told), self.target)
        if problems := match_catalogue(self.old, catalogue):
            raise SwitchAbortedError("; ".join(problems))
        assert self.new is not None
        if self.order.after:
            self.old = inside(self.old, catalogue)
        self._saved = BeforeStep(self.old)
        ownership = Ownership(self.way.over(self.target), read.placements)
        self.new.catalogue, self.new.ownership = self.old.catalogue, ownership
        topic, whole = f"s{self.order.number}/plan", self.way.keeps_books
        over = self.way.crossing.over if self.way.crossing else ()
        if self.checkpoint is not None:
            self._files = Files.open(self.checkpoint, self.old, slice(self.party.rank, None, self.party.world_size))
        reads = self._reads if self._files is not None else None
        self.blueprint = draw(
            *(self.party, self.order.mode, self.old, self.new, topic),
            members=over,
            whole=whole,
            loss=self.loss,
            reads=reads,
        )
        self._fetches = self._reads(self.party.rank) if self._files is not None else ()
        assert self.old.ownership is not None
        self._proof = Proof(
            catalogue=self.old.catalogue,
            old=self.old.ownership,
            new=ownership,
            rank=self.party.rank,
        )
        if self.way.after is not None:  # here and not in `warm`: it computes, and nobody waits for it
            here = (self.target, self.way.after.members)
            if here not in self.way.standing.rehearsed:  # else torch has decided all that it has to
                rehearse(self.new.optimizer)
                self.way.standing.rehearsed.add(here)

    def _reads(self, rank: int) -> tuple[Fetch, ...]:
        """What a rank reads from the checkpoint."""
        assert self._files is not None
        assert self.new is not None
        assert self.loss is not None
        assert self.old.ownership is not None
        assert self.new.ownership is not None
        return self._files.fetches(self.old.ownership, self.new.ownership, rank, self.loss)

    def _describe(self) -> list[Any] | None:
        """What this rank tells of the new world, which it makes where it has none yet; None of a leaver.

        Raises:
            SwitchAbortedError: a newcomer holds other states than the run, by name.
        """
        after = self.way.after
        if after is None:
            self.new = nothing(self.target, self.old.mesh)
            return None
        if self.new is None:
            with self.way.inside():
                self.new = make_world(after, self.way.made, self.target, on_meta=True)
        elif other := other_states(self.new, self.old.catalogue):
            raise SwitchAbortedError(f"the states of {', '.join(other)} are not those of the run: register what it has")
        if not self.way.comes:
            require_reduced(after, self.new, self.old)
        states = values_alone(self.new)
        if self.order.after:
            states = with_gradients(states, self.new)
        return report(self.new, states, after.rank)

    def _warm(self) -> None:
        self._channel.at("warm")
        self.party.memory.peak = self.party.memory.held  # from here on it is this switch's
        self._channel.group("check")
        assert self.blueprint is not None
        assert self.new is not None
        part, transport = self.blueprint.part, self._channel.transport("moves")
        self._moves = Exchange(
            plan=part,
            catalogue=self.old.catalogue,
            transport=transport,
            pool=self.party.memory,
            # On devices the checksums would travel beside the step's own collectives, which NCCL may not survive.
            keeps_sources=not self._tight and self.party.device.type == "cpu",
        )
        for kept in self.wards.values():
            for granule, its in kept.items():
                self._moves.kept.setdefault(granule, []).append(its)
        self._staging = self._moves.warm()
        if self.way.comes:
            self._live = self.new.pieces(self.party.rank, self.party.device)
            self.party.memory.hold(self._live.values())
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
            if self.way.after is not None and not self.way.comes:
                adopt_ahead(self.old, self.new, self._targets, adopted)

    def _allocate(self, granule: Granule) -> Piece | None:
        """This rank's new piece; a newcomer's world has storage already, and is filled in place."""
        assert self.new is not None
        if self.way.comes:
            return self._live.get(granule)
        return allocate(self.party, self.old, self.new, granule, self._shared)

    def go_on(self, order: Order) -> None:
        """What was prepared ahead is wanted now: from here on this is ``order``'s."""
        self.order, self._channel.number = order, order.number
        self.party.memory.peak = self.party.memory.held

    def give_up(self) -> None:
        """Before the move: free what ``build`` and ``warm`` made. While their thread still writes, call it again."""
        self._given_up = True
        self.way.close()
        if self._thread is None or self.prepared:
            self._free()

    def _free(self) -> None:
        if self._moves is not None:
            self._moves.release()
        while self._targets:
            self.party.memory.give_back(self._targets.popitem()[1])

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase took on this rank."""
        return self._channel.seconds

    @property
    def carried_by(self) -> str:
        """What carries the moves, or would have."""
        return self._moves.transport.name if self._moves else self.party.groups.backend

    @property
    def digest_seconds(self) -> float:
        """What the checksums of the moves took on this rank so far, of the seconds of ``move``."""
        return self._moves.hash_seconds if self._moves else 0.0

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
