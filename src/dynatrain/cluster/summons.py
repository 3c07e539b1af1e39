"""A change of the world's members, as the agents tell it each other, and what becomes of it. Values and rules, pure.

Node 0's agent leads: it writes one summons on the run's board and takes it through its stages; every agent reads it,
starts its newcomers, sees that its leavers go, and says how far it is.

==========  ======================================================  ===================================================
stage       what agents do                                          what comes next
==========  ======================================================  ===================================================
``coming``  start their newcomers                                   all have beaten once: ``asked``; one is lost, or
                                                                    the run stops: ``undone``
``asked``   know that leavers may go; once all have heard, the      the ranks' answer: ``done``, or ``undone`` for any
            crossing is published to the ranks; whoever loses a     other; the old world has ended, or the ranks were
            newcomer gives it up on the crossing's board, which     not asked yet and one is lost or the run stops:
            the ranks may have decided before                       ``undone``
``done``    give leavers a while to end, then kill them             all of them are gone: the request is answered
``undone``  kill their newcomers                                    likewise; the world is as it was
==========  ======================================================  ===================================================

A *loss* is a summons, too: of what is left of a world that has lost members. Nobody asks for it, so nothing is
published and no answer awaited: ranks hear by their alarm (:mod:`dynatrain.cluster.alarm`), and whether they have
crossed is read off the crossing's board. See :mod:`dynatrain.cluster.lost`.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Self

from dynatrain.observe.requests import Answer

Stage = Literal["coming", "asked", "done", "undone"]

GONE_SECONDS = 5.0
"""For the kernel to end what was killed; a process that hangs inside it is named, and not waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """A member that is to be started.

    Attributes:
        member: its number.
        node: where it runs.
        slot: its place there.
    """

    member: int
    node: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summons:
    """A crossing, as far as it has come.

    Attributes:
        generation: of the world to come; no other crossing has it, not after this one was given up either.
        old: members of the world, by rank.
        new: of the world to come, by rank.
        newcomers: who comes, and where.
        layout: of the world to come, as text.
        mode: of the switch; empty for the run's own.
        stage: see the module's text.
        reason: why it was given up.
        lost: members of the old world that are gone.
        why: what has become of them, in words.
    """

    generation: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    newcomers: tuple[Newcomer, ...]
    layout: str
    mode: str = ""
    stage: Stage = "coming"
    reason: str = ""
    lost: tuple[int, ...] = ()
    why: str = ""

    @property
    def survivors(self) -> tuple[int, ...]:
        """Members of the old world that are not lost, by old rank."""
        return tuple(member for member in self.old if member not in self.lost)

    @property
    def leavers(self) -> tuple[int, ...]:
        """Members of the old world alone, lost ones among them."""
        return tuple(member for member in self.old if member not in self.new)

    @property
    def coming(self) -> tuple[int, ...]:
        """Members of the new world alone."""
        return tuple(newcomer.member for newcomer in self.newcomers)

    @property
    def holders(self) -> int:
        """How many take part."""
        return len(self.survivors) + len(self.newcomers)

    @property
    def going(self) -> tuple[int, ...]:
        """Members that are to be gone before the crossing is over; empty while it is open."""
        return {"done": self.leavers, "undone": self.coming}.get(self.stage, ())

    @property
    def is_open(self) -> bool:
        """Whether it is not decided yet."""
        return self.stage in {"coming", "asked"}

    @property
    def mark(self) -> str:
        """Names the crossing and its stage: by it an agent says what it has heard."""
        return f"{self.generation} {self.stage}"

    @property
    def arguments(self) -> dict[str, object]:
        """What the ranks are told."""
        told = {"layout": self.layout, "members": list(self.new), "generation": self.generation}
        return told | ({"mode": self.mode} if self.mode else {})

    def at(self, stage: Stage, reason: str = "") -> Self:
        """The same crossing in another stage."""
        return replace(self, stage=stage, reason=reason)

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(text)
        newcomers = tuple(Newcomer(**one) for one in found["newcomers"])
        members = {name: tuple(found[name]) for name in ("old", "new", "lost")}
        return cls(**{**found, **members, "newcomers": newcomers})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What the leading agent sees of a crossing.

    Attributes:
        waited: seconds in the present stage.
        absent: newcomers that have not beaten yet.
        lost: what has become of newcomers that cannot take part, in words.
        living: members whose processes live, of all nodes.
        heard: by node, the :attr:`Summons.mark` that its agent has acted on.
        stopping: whether the run was asked to stop.
        published: whether the ranks were asked.
        answer: what the ranks say of it.
    """

    waited: float
    absent: Collection[int] = ()
    lost: Collection[str] = ()
    living: Collection[int] = ()
    heard: Mapping[int, str] = field(default_factory=dict)
    stopping: bool = False
    published: bool = False
    answer: Answer | None = None


def advance(summons: Summons, sight: Sight) -> Summons:
    """The stage that follows from what is seen; the same summons where that is the present one."""
    if summons.is_open and not sight.published:
        if sight.lost:
            return summons.at("undone", "; ".join(sight.lost))
        if sight.stopping:
            return summons.at("undone", "the run is stopping")
    if summons.stage == "coming" and not sight.absent:
        return summons.at("asked")
    if summons.stage == "asked":
        if sight.answer is not None:
            done = sight.answer.outcome == "done"
            return summons.at("done" if done else "undone", "" if done else sight.answer.message)
        if not set(summons.old) & set(sight.living):
            return summons.at("undone", "the run has ended")
    return summons


def is_over(summons: Summons, sight: Sight, leave_seconds: float) -> bool:
    """Whether nothing is left to do: every agent has heard of the end, and who was to go has gone, or hangs.

    Args:
        summons: the crossing.
        sight: what is seen of it.
        leave_seconds: what leavers have to end by themselves.
    """
    if summons.is_open or any(mark != summons.mark for mark in sight.heard.values()):
        return False
    return not set(summons.going) & set(sight.living) or sight.waited > leave_seconds + GONE_SECONDS
