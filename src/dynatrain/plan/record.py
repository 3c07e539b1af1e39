"""The file ``plan.json``: a plan in numbers and a hash, and what the whole of it can be derived from again.

The moves are not in it. With the tensors, how each lies before and after, and the two layouts, every rank's moves are
derived anew in milliseconds, and the hash says whether they are the ones that were carried out. Of a plan after a loss
it also has who was lost and what the others had in memory, from which follows where every box comes from.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from dynatrain.layout.layout import Layout
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.observe.fields import shown
from dynatrain.observe.objects import ObjectError, parse_object
from dynatrain.plan.build import Adoptable
from dynatrain.plan.damage import damage
from dynatrain.plan.hashes import plan_hash
from dynatrain.plan.plan import Kept, Loss
from dynatrain.plan.schedule import ROUND_BYTES
from dynatrain.plan.summary import PlanSummary
from dynatrain.plan.table import WholePlan
from dynatrain.space.ownership import Ownership, Placement
from dynatrain.space.tensor import Catalogue, State, Tensor

SCHEMA = 7
"""Version of the record; a reader refuses others."""


class PlanRecordError(ValueError):
    """A text that is no plan record.

    Attributes:
        problems: everything that is wrong with it.
    """

    def __init__(self, what: str, problems: tuple[str, ...] = ()) -> None:
        self.problems = problems or (what,)
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems))))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTensor:
    """One tensor of a plan.

    Attributes:
        tensor: itself.
        old: how it lies before.
        new: how it lies after.
        adoptable: whether an unchanged piece may keep its storage.
    """

    tensor: Tensor
    old: Placement
    new: Placement
    adoptable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """One plan, as recorded. ``from_`` is ``from`` in the record.

    Attributes:
        schema: :data:`SCHEMA`.
        from_: the old layout's text.
        to: the new layout's text.
        members: of a crossing: the holder that each rank of ``to`` is. The ranks of ``from`` are holders 0, 1, ..., and
            newcomers follow them. Empty where rank r is the same before and after.
        holders: after a loss: the holder that each rank of ``from`` is; else empty.
        loss: which holders are lost, and what the others go on from; None where nobody is.
        mode: ``keep`` or ``tight``.
        budget_bytes: bytes above ``max(old, new)`` that a rank may hold, staging included; 0 in ``keep``, which has no
            such bound.
        round_bytes: bytes of whole tensors that travel in one round of ``keep``.
        ranks_per_node: as the sources were chosen; None where all ranks are on one node.
        plan_hash: as 16 hexadecimal digits.
        rounds: number of rounds.
        bytes: ``moved``, ``relaid`` and ``adopted``, over all ranks.
        peak_bytes: predicted for each rank, or holder, pieces alone.
        floor_bytes: ``link`` and ``machine``, see :class:`~dynatrain.plan.summary.PlanSummary`.
        tensors: the catalogue, and how each of its tensors lies.
    """

    schema: int = SCHEMA
    from_: str
    to: str
    members: tuple[int, ...]
    mode: str
    budget_bytes: int
    round_bytes: int
    ranks_per_node: int | None
    plan_hash: str
    rounds: int
    bytes: Mapping[str, int]
    peak_bytes: tuple[int, ...]
    floor_bytes: Mapping[str, int]
    tensors: tuple[RecordedTensor, ...]
    holders: tuple[int, ...] = ()
    loss: Loss | None = None

    @property
    def catalogue(self) -> Catalogue:
        """The tensors."""
        return tuple(one.tensor for one in self.tensors)

    def ownerships(self) -> tuple[Ownership, Ownership]:
        """Who owns what before and after, of a crossing by holder.

        Raises:
            LayoutError: a layout's text was damaged.
        """
        old, new = parse_layout(self.from_), parse_layout(self.to)
        return (
            Ownership(old.over(self.holders or old.ranks), {one.tensor.name: one.old for one in self.tensors}),
            Ownership(new.over(self.members or new.ranks), {one.tensor.name: one.new for one in self.tensors}),
        )

    def to_json(self) -> str:
        """The record as text; one tensor a line, so that two records can be compared by eye."""
        head = {"from" if name == "from_" else name: value for name, value in asdict(self).items()}
        head["loss"] = None if self.loss is None else asdict(self.loss) | {"lost": sorted(self.loss.lost)}
        tensors = ",\n  ".join(json.dumps(tensor) for tensor in head.pop("tensors"))
        return f'{json.dumps(head, indent=1)[:-2]},\n "tensors": [\n  {tensors}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            PlanRecordError: the text is no such record; with everything that is wrong.
        """
        try:
            found = parse_object(text)
        except ObjectError as error:
            raise PlanRecordError(f"not a plan record: it {error}") from None
        return cls.from_object(found)

    @classmethod
    def from_object(cls, found: object) -> Self:
        """As :meth:`from_json`, of what was read from JSON; left as it is.

        Raises:
            PlanRecordError: it is no such record; with everything that is wrong.
        """
        if isinstance(found, dict) and "schema" in found and found["schema"] != SCHEMA:
            raise PlanRecordError(f"a plan record of schema {shown(found['schema'])}; this version reads {SCHEMA}")
        if problems := damage(found):
            raise PlanRecordError("not a plan record", problems)
        assert isinstance(found, dict)
        read = {"from", "members", "holders", "loss", "tensors", "peak_bytes"}
        more = {name: value for name, value in found.items() if name not in read}
        return cls(
            from_=found["from"],
            members=tuple(found["members"]),
            holders=tuple(found["holders"]),
            loss=None if found["loss"] is None else _loss(found["loss"]),
            tensors=tuple(map(_tensor, found["tensors"])),
            peak_bytes=tuple(found["peak_bytes"]),
            **more,
        )


def record_of(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    plan: WholePlan,
    summary: PlanSummary,
    *,
    members: tuple[int, ...] = (),
    budget_bytes: int,
    round_bytes: int = ROUND_BYTES,
    ranks_per_node: int | None,
    adoptable: Adoptable,
    holders: tuple[int, ...] = (),
    loss: Loss | None = None,
) -> PlanRecord:
    """The record of ``plan``, which takes ``old`` to ``new``.

    Arguments as the planner was given them; ``members`` are those over which the layout of ``new`` is, and ``holders``,
    after a loss, those over which that of ``old`` is.
    """
    return PlanRecord(
        from_=print_layout(own_layout(old.layout, holders)),
        to=print_layout(own_layout(new.layout, members)),
        members=members,
        holders=holders,
        loss=loss,
        mode=summary.mode,
        budget_bytes=budget_bytes,
        round_bytes=round_bytes,
        ranks_per_node=ranks_per_node,
        plan_hash=f"{plan_hash(catalogue, plan.moves):016x}",
        rounds=summary.rounds,
        bytes={"moved": summary.moved, "relaid": sum(summary.relaid), "adopted": sum(summary.adopted)},
        peak_bytes=summary.peak,
        floor_bytes={"link": summary.floor_link, "machine": summary.floor_machine},
        tensors=tuple(
            RecordedTensor(
                tensor=tensor,
                old=old.placements[tensor.name],
                new=new.placements[tensor.name],
                adoptable=adoptable(index),
            )
            for index, tensor in enumerate(catalogue)
        ),
    )


def own_layout(layout: Layout, members: tuple[int, ...]) -> Layout:
    """The layout in its own ranks, of one that is over ``members``; itself where these are empty."""
    return layout.over({holder: rank for rank, holder in enumerate(members)}) if members else layout


def _tensor(found: Mapping[str, Any]) -> RecordedTensor:
    old, new = (placement_of(found[side]) for side in ("old", "new"))
    return RecordedTensor(tensor=tensor_of(found["tensor"]), old=old, new=new, adoptable=found["adoptable"])


def _loss(found: Mapping[str, Any]) -> Loss:
    kept = tuple(Kept(**one) for one in found["kept"])
    return Loss(lost=frozenset(found["lost"]), step=found["step"], kept=kept, files=found["files"])


def tensor_of(fields: Mapping[str, Any]) -> Tensor:
    """A tensor from what JSON made of its fields: lists stand for tuples."""
    return Tensor(
        name=fields["name"],
        shape=tuple(fields["shape"]),
        cuts=_pairs(fields["cuts"]),
        anchors=tuple(fields["anchors"]),
        states=tuple(State(**state | {"reduced": tuple(state["reduced"])}) for state in fields["states"]),
        unit=fields["unit"],
        within=fields["within"],
    )


def placement_of(found: Mapping[str, Any]) -> Placement:
    """A placement from what JSON made of its fields."""
    spans = tuple((start, stop, local, room) for start, stop, local, room in found["spans"])
    return Placement(_pairs(found["cuts"]), tuple(found["stages"]), spans, found["along"])


def _pairs(cuts: list[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((axis, dim) for axis, dim in cuts)
