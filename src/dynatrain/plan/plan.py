"""The format of a plan: what a switch moves, from whom to whom, in which rounds.

This format is all that the builder (``plan.build``), the judge (``dynatrain.judge``) and the execution share.

A *granule* is one state of one tensor: the least thing that changes hands at once. A *round* is a set of granules
that travel together; the same rounds hold on every rank, because they are derived from numbers that every rank has.
Within a round a rank posts all its receives, then all its sends, then waits for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynatrain.space.box import Box

Granule = tuple[int, int]
"""``(index of the tensor in the catalogue, index of the state in the tensor's states)``."""


@dataclass(frozen=True, slots=True)
class Move:
    """One box from one holder to one holder, for every state of ``states``.

    ``src == dst`` is a box that stays on its rank but is laid out anew (a local copy).

    Attributes:
        tensor: index in the catalogue.
        states: indices of the tensor's states that share the box: all of one form.
        box: in the coordinates of the logical state; ``()`` for a scalar.
        src: holder that has it under the old ownership.
        dst: holder that needs it under the new one.
    """

    tensor: int
    states: tuple[int, ...]
    box: Box
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds: which granules travel together, in order; and who begins to send. Equal on every rank.

    Attributes:
        rounds: granules of each round; every granule of the catalogue is in exactly one round.
        mode: ``keep`` (old state lives to the commit) or ``tight`` (handed over granule by granule).
        turns: of each family of tensors (:mod:`dynatrain.plan.sources`), whose turn it is to send the first one; empty
            where turns are counted on from family to family.
    """

    rounds: tuple[tuple[Granule, ...], ...]
    mode: str
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes:
        rank: whose part.
        sends: moves with ``src == rank != dst``.
        receives: moves with ``dst == rank != src``.
        relays: moves with ``src == dst == rank``: kept, but laid out anew.
        adopted: granules whose piece is the same box in the same storage layout before and after: nothing is written.
        schedule: the rounds, equal on every rank.
    """

    rank: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    relays: tuple[Move, ...]
    adopted: tuple[Granule, ...]
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one holder has in memory of one old rank's pieces, as they were at one step.

    Attributes:
        holder: who has it.
        owner: the old rank whose pieces they are. The holder's own: all of them. Another's, whose *keeper* the holder
            then is: those boxes of it that no other old rank holds.
        step: so many steps had been trained.
        live: whether these are the very pieces that the holder trains with, which may be adopted; else a snapshot.
        complete: whether all of it has arrived; what has not counts as nothing.
    """

    holder: int
    owner: int
    step: int
    live: bool = False
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Which old ranks are gone, and what the others go on from. Equal on every rank.

    Attributes:
        lost: holders whose memory is gone; all of them old ranks.
        step: of which all state is to be: so many steps have been trained then.
        kept: all that is known of memory, also of other steps, and also what the lost ones had.
        files: step of the files that fill what nobody's memory has; None where no file is read.
    """

    lost: frozenset[int]
    step: int
    kept: tuple[Kept, ...]
    files: int | None = None


Boxes = Mapping[Granule, Sequence[Box]]
"""The boxes that a shelf, a holder made of files, owns of each granule: disjoint, together the whole."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One box between a rank's piece and one of a shelf's boxes.

    Attributes:
        granule: which tensor and state.
        box: in the coordinates of the logical state; ``()`` for a scalar.
        place: which of the shelf's boxes of the granule.
    """

    granule: Granule
    box: Box
    place: int


@dataclass(frozen=True, slots=True)
class Transform:
    """What a move does to its box on the way: pure, element by element, declared.

    Attributes:
        cast: element type that it arrives in.
        transposed: its two dims arrive the other way round.
        apart: it is of one expert of a stack, and arrives without the stack's dim.
    """

    cast: str
    transposed: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """A move into a tensor that is no logical one: where it goes there, and as what. Fusing is the place.

    Attributes:
        move: of one state, between holders.
        tensor: name of the target's own tensor.
        place: the box in it, in the coordinates of the target's part.
        transform: on the way.
    """

    move: Move
    tensor: str
    place: Box
    transform: Transform
