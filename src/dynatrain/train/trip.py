"""All state of a job from the device to host memory, or back: a switch between equal layouts, in other memory.

The mechanism is that of every switch: a plan (each piece kept by its rank, and laid out anew), its judge, rounds, full
digests before and after, one agreed commit or abort. Its mode is ``keep``, and needs no other: the two ends lie in
different memories, so that the most that either holds is what it holds at the one end or at the other.

The objects that are trained stay. Their storage is given up and later restored under them, as in the way back of a
switch in ``tight``: no handle changes, and training goes on as if nothing had been.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynatrain.execute.census import DigestReport
from dynatrain.execute.exchange import Exchange
from dynatrain.execute.host import room_for
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.rounds import Executor
from dynatrain.execute.transport import GroupTransport
from dynatrain.judge.judge import judge_rank, judge_whole
from dynatrain.layout.layout import Layout
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.hashes import received_hash, sent_hash
from dynatrain.plan.plan import Granule
from dynatrain.plan.record import record_of
from dynatrain.plan.schedule import keep_schedule
from dynatrain.plan.storage import storage
from dynatrain.plan.summary import summarise
from dynatrain.train.agreement import Objection, SwitchAbortedError, objection_of
from dynatrain.train.blueprint import MODULUS, Blueprint
from dynatrain.train.channel import Channel
from dynatrain.train.copies import settle_copies
from dynatrain.train.order import Order
from dynatrain.train.party import PHASES, Party
from dynatrain.train.passage import Passage, passage
from dynatrain.train.proof import Proof
from dynatrain.train.world import World

Room = Callable[[Blueprint], str]
"""Why this rank has no room for what the plan has it hold at most; empty where it has."""


def never(_tensor: int) -> bool:
    """No piece keeps its storage."""
    return False


@dataclass(slots=True, kw_only=True)
class Trip:
    """One rank's part in one way. Begun between two steps, on all ranks; blocks until it is decided.

    Attributes:
        party: this rank.
        order: what was agreed; its number is the switch's.
        old: the world whose state travels, and which has it afterwards.
        blueprint: the judged plan, from :meth:`prepare` on.
        host: bytes of host memory that this rank has taken for it.
    """

    party: Party
    order: Order
    old: World
    blueprint: Blueprint | None = None
    way: Passage = field(init=False)
    proof: Proof = field(init=False)
    host: int = 0
    _channel: Channel = field(init=False)
    _executor: Executor | None = None

    def __post_init__(self) -> None:
        self.way = passage(self.party, self.order)
        self._channel = Channel(self.party, self.order.number, self.way.groups, f"s{self.order.number}")
        owner = self.old.ownership
        assert owner is not None
        self.proof = Proof(catalogue=self.old.catalogue, old=owner, new=owner, rank=self.party.rank)

    # What the records ask of an attempt.

    @property
    def target(self) -> Layout:
        """The layout, which stays."""
        return self.old.layout

    @property
    def report(self) -> DigestReport | None:
        """The digests' verdict, once they were compared."""
        return self.proof.report

    @property
    def mended(self) -> int:
        """Copies that differed and were given copy 0's values."""
        return self.proof.mended

    @property
    def carried_by(self) -> str:
        """What carried the moves: every piece stays with its rank."""
        return "memory"

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase took on this rank."""
        return self._channel.seconds

    def prepare(self, room: Room) -> None:
        """Plan, have it judged, and see that there is room on every rank.

        Raises:
            SwitchAbortedError: it cannot be; on every rank, with the numbers.
        """
        blueprint, hashes, objection = None, None, None
        with self._channel.timed("build"):
            try:
                self._channel.at("build")
                blueprint = self._draw()
                hashes = [of(self.old.catalogue, blueprint.part) for of in (sent_hash, received_hash)]
                if why := room(blueprint):
                    objection = Objection(why=why)
            except Exception as problem:  # noqa: BLE001 - told to all ranks
                objection = objection_of(problem)
            told = self._channel.ask("build", hashes, objection, self.party.patience)
        sent, received = (sum(column) % MODULUS for column in zip(*told, strict=True))
        if sent != received:
            raise SwitchAbortedError(f"senders planned {sent:016x}, receivers {received:016x}: the ranks' plans differ")
        assert blueprint is not None
        self.blueprint = replace(blueprint, plan_hash=sent)

    def carry(
        self, source: Callable[[], Pieces], target: Callable[[Granule], Piece | None], *, like: Proof | None
    ) -> None:
        """Bring every piece to the other memory, and prove that it is there.

        Args:
            source: gives what is to travel, at rest.
            target: where each piece goes.
            like: has noted the digests that ``source`` has to have; None where any will do.

        Raises:
            SwitchAbortedError: ``source`` is as it was; on every rank. What ``target`` gave is the caller's to free.
        """
        self.party.memory.peak = self.party.memory.held
        with self._channel.timed("quiesce"):
            held = self._answered("quiesce", source)
        with self._channel.timed("warm"):
            self._answered("warm", lambda: self._channel.group("check"))  # all ranks make it, and none is left waiting
        with self._channel.timed("move"):
            self._answered("move", lambda: self._move(held, target))
        with self._channel.timed("check"):
            after = self._answered("check", lambda: self._digest(held, like))
            self._answered("judged", lambda: self._judge(after, held))  # together: all are here

    def settle(self) -> dict[int, Any]:
        """Agree to commit; all ranks' measurements.

        Raises:
            SwitchAbortedError: as in :meth:`carry`.
        """
        objection = None
        try:
            self._channel.at("commit")
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        with self._channel.timed("commit"):
            self.seconds["compile"] = 0.0
            facts = {"seconds": self.seconds, "peak": self.party.memory.peak, "staging": 0, "host": self.host}
            told = self._channel.ask("commit", facts, objection)
        return dict(enumerate(told))

    def give_up_source(self) -> None:
        """After the commit: free what has left this rank's pool."""
        assert self._executor is not None
        self._executor.release()

    def close(self) -> None:
        """It is over, one way or the other: nothing of its own is left."""
        self.way.groups.close()

    def _answered(self, what: str, work: Callable[[], Any]) -> Any:
        """What ``work`` gives, once it has succeeded on all ranks."""
        done, objection = None, None
        try:
            if what in PHASES:
                self._channel.at(what)
            done = work()
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
        self._channel.ask(what, None, objection)
        return done

    def _draw(self) -> Blueprint:
        """The judged plan.

        Raises:
            PlanError: the judge refuses.
        """
        party, catalogue, owner = self.party, self.old.catalogue, self.old.ownership
        assert owner is not None
        schedule = keep_schedule(catalogue, party.round_bytes, (owner, owner))
        how = {"ranks_per_node": party.ranks_per_node}
        table = storage(catalogue, owner, owner, adoptable=never)
        part = rank_plan(catalogue, owner, owner, party.rank, schedule, adoptable=never, **how)
        problems = list(judge_rank(catalogue, owner, owner, part).problems)
        coverage, summary, record = {}, None, None
        if party.rank == 0:
            whole = whole_plan(catalogue, owner, owner, schedule, adoptable=never, **how)
            verdict = judge_whole(catalogue, owner, owner, whole)
            problems += verdict.problems
            coverage = dict(verdict.coverage)
            summary = summarise(catalogue, owner, owner, whole, table, **how)
            record = record_of(
                *(catalogue, owner, owner, whole, summary),
                budget_bytes=0,
                round_bytes=party.round_bytes,
                adoptable=never,
                **how,
            )
        if part.sends or part.receives:
            problems.append("pieces would leave their rank")
        if problems:
            raise PlanError("the judge refuses the plan: " + "; ".join(problems))
        pieces = sum(len(tensor.states) for tensor in catalogue)
        host = tuple(room_for(nbytes, pieces) for nbytes in table.new.tolist())
        return Blueprint(part, 0, tuple(table.old.tolist()), coverage, summary, record, host=host)

    def _move(self, held: Pieces, target: Callable[[Granule], Piece | None]) -> None:
        assert self.blueprint is not None
        # No message leaves its rank: what the transport is asked for is to be closed where a rank fails.
        party, group = self.party, self._channel.group("check")
        transport = GroupTransport(group, party.everyone)
        moves = Exchange(plan=self.blueprint.part, catalogue=self.old.catalogue, transport=transport, pool=party.memory)
        if party.unequal_copies == "owner":
            self.proof.note(held)
            settle_copies(self.proof, moves, held, group, party.unequal_copies, party.deadline)
        self._executor = Executor(
            exchange=moves, old=held, target=target, agree=lambda _number: True, hook=self._channel.at
        )
        self._executor.run(self.party.deadline)

    def _digest(self, held: Pieces, like: Proof | None) -> torch.Tensor:
        """This rank's digests of what has arrived; those of ``held`` are noted."""
        assert self._executor is not None
        self.proof.note(held)
        if like is not None and not equal_notes(like, self.proof):
            raise SwitchAbortedError("host memory has other bits than were parked", proven=True)
        return self.proof.after(self._executor.new)

    def _judge(self, after: torch.Tensor, held: Pieces) -> None:
        assert self._executor is not None
        if wrong := self.proof.judge(after, held, self._executor.new, self._channel.group("check")):
            raise SwitchAbortedError(wrong, proven=True)


def equal_notes(one: Proof, other: Proof) -> bool:
    """Whether this rank has noted equal digests for both."""
    assert one.before is not None
    assert other.before is not None
    return bool(one.before.equal(other.before))
