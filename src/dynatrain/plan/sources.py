"""Which holder sends: one closed rule of (tensor, source cell, target rank), equal on every rank.

Under one ownership the pieces of a tensor form a *grid*: the tensor, cut per ``(axis, dim)`` in order into ceil-sized
chunks (or, along one dim, into the spans of its placement). A *cell* is one box of the grid, named by its index along
each cut; its holders are its copies over the digits of a rank's number that no cut reads, and over the stages that hold
it. Everything here follows from dividing by chunk sizes: the cells that meet a box are found without looking at any
rank, and a rank's cell without looking at any other.

The rule, for a target rank that needs a part of a source cell:

1. the target itself, if it holds the cell;
2. else a holder on the target's node, if there is one;
3. else any holder.

After a loss (``plan.left``) only those count as holders that have the cell of the step from which the run goes on; a
keeper has its wards' cells beside its own.

Among several, they take turns. The turn is the target's number among those that need the cell, one more after each
round of all holders (or every second target, where the others hold the cell themselves, would always ask the same one
of two), plus the tensor's number, counted through the tensors that lie alike (its *family*) and on through the next
family: so the replicas of a cell share its targets, and where a cell has fewer targets than replicas they share the
tensors. Counted anew in every family, the first replica would send what there is one of: embedding, head and the first
layer's tensors. Where turns of equal number are not of equal bytes, the announcer says where each family begins
(:mod:`dynatrain.plan.turns`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import filterfalse

from dynatrain.plan.errors import PlanError
from dynatrain.plan.left import Left
from dynatrain.plan.mesh import Mesh
from dynatrain.plan.plan import Granule, Loss
from dynatrain.space.box import Box, chunk, intersect, volume, whole
from dynatrain.space.ownership import Ownership, Placement
from dynatrain.space.tensor import Catalogue, State

Cell = tuple[int, ...]
"""Index along each cut of a grid; ``()`` where nothing cuts the tensor."""


class Grid:
    """The cells of one family of tensors under one ownership, and who holds them.

    Attributes:
        shape: of the tensors.
        stages: the pp indices of their holders.
        digits: ``(stride, ways)`` of each cut in the numbers of ranks, in cutting order.
        cuts: ``(dim, ways)`` of each cut.
    """

    def __init__(self, shape: tuple[int, ...], placement: Placement, mesh: Mesh) -> None:
        self.shape = shape
        self._mesh = mesh
        self._placement = placement
        self.stages = placement.stages
        self.digits = tuple(mesh.layout.digit(axis) for axis, _ in placement.cuts)
        self.cuts = tuple((dim, ways) for (_, dim), (_, ways) in zip(placement.cuts, self.digits, strict=True))
        self._owners: dict[Cell, tuple[int, ...]] = {}

    @cached_property
    def offsets(self) -> list[int]:
        """What is added to a cell's number to give those of its holders, by copy number."""
        offsets = [stage * self._mesh.stage_size for stage in self.stages]
        for stride, ways in self._mesh.layout.left_over(axis for axis, _ in self._placement.cuts):
            offsets = [at + i * stride for at in offsets for i in range(ways)]
        return offsets

    @cached_property
    def _copies(self) -> dict[int, int]:
        return {offset: copy for copy, offset in enumerate(self.offsets)}

    def cell_of(self, rank: int) -> Cell | None:
        """The cell that ``rank`` holds (perhaps of no elements); None outside the tensor's stages and the world."""
        if rank >= len(self._mesh.numbers):
            return None
        number = self._mesh.numbers[rank]  # of nobody -1, which is in no stage
        if number // self._mesh.stage_size not in self.stages:
            return None
        return tuple([number // stride % ways for stride, ways in self.digits])

    def box(self, cell: Cell) -> Box:
        """The box of ``cell`` in the tensor; empty for a trailing cell that got nothing."""
        box = list(whole(self.shape))
        at = 0
        for (dim, ways), index in zip(self.cuts, cell, strict=True):
            if self._placement.spanned(dim):
                at = at * ways + index
            else:
                box[dim] = chunk(*box[dim], ways, index)
        if self._placement.spans:
            box[self._placement.along] = self._placement.spans[at][:2]
        return tuple(box)

    def _base(self, cell: Cell) -> int:
        return sum(stride * index for (stride, _), index in zip(self.digits, cell, strict=True))

    def owners(self, cell: Cell) -> tuple[int, ...]:
        """The ranks that hold ``cell``, by copy number."""
        found = self._owners.get(cell)
        if found is None:
            base, ranks = self._base(cell), self._mesh.ranks
            found = self._owners[cell] = tuple(ranks[base + offset] for offset in self.offsets)
        return found

    def copy_of(self, rank: int, cell: Cell) -> int:
        """Which copy of ``cell`` its holder ``rank`` has."""
        return self._copies[self._mesh.numbers[rank] - self._base(cell)]

    def cells(self) -> Iterator[Cell]:
        """All cells that have elements."""
        for cell, _ in self.meeting(whole(self.shape)):
            yield cell

    def meeting(self, box: Box) -> list[tuple[Cell, Box]]:
        """The cells that share elements with ``box``, and the shared boxes; by division of its bounds, or by span."""
        if not volume(box):
            return []
        if self._placement.spans:
            cells = itertools.product(*(range(ways) for _, ways in self.cuts))
            return [(cell, common) for cell in cells if (common := intersect(self.box(cell), box)) is not None]
        found: list[tuple[Cell, Box]] = [((), whole(self.shape))]
        for dim, ways in self.cuts:
            start, stop = box[dim]
            deeper: list[tuple[Cell, Box]] = []
            for cell, outer in found:
                low, high = outer[dim]
                size = -(-(high - low) // ways)
                first = (max(start, low) - low) // size
                last = -(-(min(stop, high) - low) // size)
                for index in range(first, last):
                    part = chunk(low, high, ways, index)
                    deeper.append(((*cell, index), (*outer[:dim], part, *outer[dim + 1 :])))
            found = deeper
        return [(cell, common) for cell, outer in found if (common := intersect(outer, box)) is not None]


@dataclass(frozen=True, slots=True)
class Cut:
    """A box that a target needs out of one source cell, and who may send it.

    Attributes:
        box: in the coordinates of the logical tensor; never empty.
        cell: the source cell.
        sources: the ranks that take turns; the target alone where it holds the cell; empty where no memory has it.
        turn: whose turn it is for the family's first tensor; the next tensor has the next turn.
    """

    box: Box
    cell: Cell
    sources: tuple[int, ...]
    turn: int

    def source(self, number: int) -> int:
        """The rank that sends this box of the family's tensor ``number``."""
        return self.sources[(number + self.turn) % len(self.sources)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """States of one tensor that travel in the same boxes: all of one form."""

    tensor: int
    states: tuple[int, ...]

    @property
    def granules(self) -> tuple[Granule, ...]:
        """The same, one granule per state."""
        return tuple((self.tensor, state) for state in self.states)


class Family:
    """Items that lie alike, before and after: equal shape, equal placements. They differ by whose turn it is."""

    def __init__(self, old: Grid, new: Grid, ranks_per_node: int | None, left: Left | None = None) -> None:
        self.old = old
        self.new = new
        self.items: list[Item] = []
        self.first = 0  # whose turn it is for the first item: its number, counted through all families, or as told
        self._left = left
        self._ranks_per_node = ranks_per_node
        self._needs: dict[Cell, list[tuple[Cell, Box]]] = {}
        self._positions: dict[Cell, dict[Cell, int]] = {}
        self._near: dict[Cell, dict[int, tuple[int, ...]]] = {}
        self._places: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}

    def keeps(self, target: int) -> bool:
        """Whether ``target`` owns the same box, not an empty one, before and after, and trains with it."""
        before, after = self._holds(target), self.new.cell_of(target)
        if before is None or after is None or (self._left is not None and not self._left.live):
            return False
        box = self.new.box(after)
        return volume(box) > 0 and self.old.box(before) == box

    def incoming(self, target: int) -> Iterator[Cut]:
        """What ``target`` needs, one cut per source cell; together they are its new piece exactly."""
        cell = self.new.cell_of(target)
        if cell is None:
            return
        if cell not in self._needs:
            self._needs[cell] = self.old.meeting(self.new.box(cell))
        for source_cell, box in self._needs[cell]:
            yield self._cut(source_cell, box, target, cell)

    def outgoing(self, source: int) -> Iterator[tuple[int, Cut, range]]:
        """What other ranks get out of the cell of ``source``: ``(target, cut, numbers of the tensors)``."""
        for cell in self._cells(source):
            for target_cell, box in self.new.meeting(self.old.box(cell)):
                for target in self._lacking(cell, self.new.owners(target_cell)):
                    if target != source:
                        sources, turn = self._senders(cell, target, target_cell)
                        if turns := self._turns(source, sources, turn):
                            yield target, Cut(box, cell, sources, turn), turns

    def _lacking(self, cell: Cell, targets: tuple[int, ...]) -> Iterator[int]:
        """Those of ``targets`` that do not hold ``cell`` themselves."""
        if self._left is not None:
            return (target for target in targets if self._holds(target) != cell)
        holders = self.old.owners(cell)
        if targets == holders:
            return iter(())
        return filterfalse(self._index(holders).__contains__, targets)

    def _index(self, holders: tuple[int, ...]) -> dict[int, int]:
        """The place of each of ``holders`` among them."""
        known, index = self._places.get(id(holders), ((), {}))
        if known is not holders:
            index = {rank: at for at, rank in enumerate(holders)}
            self._places[id(holders)] = holders, index  # which keeps the identity taken
        return index

    def _turns(self, source: int, sources: tuple[int, ...], turn: int) -> range:
        """Numbers of the family's tensors of which ``source`` sends a box that has these sources and this turn."""
        if self._left is None:
            at = self._index(sources).get(source)
        else:  # who is left is made anew for each target, and has no index
            at = sources.index(source) if source in sources else None
        return range(0) if at is None else range((at - turn) % len(sources), len(self.items), len(sources))

    def _holds(self, rank: int) -> Cell | None:
        """The cell of ``rank`` itself, if it has that."""
        return self.old.cell_of(rank) if self._left is None or rank in self._left.own else None

    def _cells(self, rank: int) -> Iterator[Cell]:
        """All cells that ``rank`` may be asked for: its own, and those of its wards."""
        own = self._holds(rank)
        if own is not None:
            yield own
        for ward in () if self._left is None else self._left.wards(rank):
            cell = self.old.cell_of(ward)
            if cell is not None and self.old.owners(cell) == (ward,):
                yield cell

    def _cut(self, cell: Cell, box: Box, target: int, target_cell: Cell) -> Cut:
        if self._holds(target) == cell:
            return Cut(box, cell, (target,), 0)
        return Cut(box, cell, *self._senders(cell, target, target_cell))

    def _senders(self, cell: Cell, target: int, target_cell: Cell) -> tuple[tuple[int, ...], int]:
        """Who takes turns to send of ``cell`` to ``target``, which does not hold it, and whose turn is first."""
        sources = self.old.owners(cell)
        if self._left is not None:
            sources = self._left.holders(sources)
        if self._ranks_per_node is not None:
            sources = self._on_nodes(cell, sources).get(target // self._ranks_per_node, sources)
        if len(sources) < 2:  # after a loss perhaps nobody
            return sources, 0
        number = self._number(cell, target, target_cell)
        return sources, self.first + number + number // len(sources)

    def _on_nodes(self, cell: Cell, sources: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Those of ``sources``, which have ``cell``, that are on each node."""
        found = self._near.get(cell)
        if found is None:
            assert self._ranks_per_node is not None
            nodes: dict[int, list[int]] = {}
            for rank in sources:
                nodes.setdefault(rank // self._ranks_per_node, []).append(rank)
            found = self._near[cell] = {node: tuple(ranks) for node, ranks in nodes.items()}
        return found

    def _number(self, cell: Cell, target: int, target_cell: Cell) -> int:
        """Number of ``target`` among all ranks whose new piece meets ``cell``."""
        positions = self._positions.get(cell)
        if positions is None:
            meeting = self.new.meeting(self.old.box(cell))
            positions = self._positions[cell] = {found: i for i, (found, _) in enumerate(meeting)}
        return self.new.copy_of(target, target_cell) * len(positions) + positions[target_cell]


def families(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    *,
    ranks_per_node: int | None = None,
    loss: Loss | None = None,
    turns: tuple[int, ...] = (),
) -> tuple[Family, ...]:
    """All items of ``catalogue``, by family, in catalogue order.

    Args:
        catalogue: the tensors.
        old: the ownership that has the state.
        new: the ownership that needs it.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; None puts all ranks on one node.
        loss: of ranks of ``old``; None where all are there.
        turns: where the turns of each family begin; empty to count them on from family to family.

    Raises:
        PlanError: tensors without a placement before or after: all of them, by name.
    """
    _refuse_unplaced(catalogue, old, new)
    meshes = Mesh(old.layout), Mesh(new.layout)
    left = None if loss is None else Left(loss)
    found: dict[tuple[object, ...], Family] = {}
    known: dict[tuple[object, ...], list[tuple[Family, tuple[int, ...]]]] = {}

    def family_of(shape: tuple[int, ...], before: Placement, after: Placement) -> Family:
        key = shape, before, after
        if key not in found:
            grids = Grid(shape, before, meshes[0]), Grid(shape, after, meshes[1])
            found[key] = Family(*grids, ranks_per_node, left)
        return found[key]

    for index, tensor in enumerate(catalogue):
        before, after = old.placements[tensor.name], new.placements[tensor.name]
        # Layers share their states, and declared tensors their placements: identities are told apart far faster.
        alike = tensor.shape, id(tensor.states), id(before), id(after)
        if alike not in known:
            known[alike] = []
            for members in _by_form(tensor.states):
                state = tensor.states[members[0]]
                sides = (before, after) if state.like_tensor else (old.placed(tensor, state), new.placed(tensor, state))
                known[alike].append((family_of(tensor.state_shape(state), *sides), members))
        for family, members in known[alike]:
            family.items.append(Item(tensor=index, states=members))
    first = 0
    for number, family in enumerate(found.values()):
        family.first, first = turns[number] if turns else first, first + len(family.items)
    return tuple(found.values())


def _by_form(states: tuple[State, ...]) -> list[tuple[int, ...]]:
    """Indices of states that lie alike, together."""
    found: dict[object, list[int]] = {}
    for at, state in enumerate(states):
        found.setdefault(state.form, []).append(at)
    return [tuple(members) for members in found.values()]


def _refuse_unplaced(catalogue: Catalogue, old: Ownership, new: Ownership) -> None:
    problems = [
        f"{len(names)} tensor(s) have no owner in the {side} layout: {', '.join(names)}"
        for side, ownership in (("old", old), ("new", new))
        if (names := [tensor.name for tensor in catalogue if tensor.name not in ownership.placements])
    ]
    if problems:
        raise PlanError(
            "; ".join(problems)
            + ". Every tensor of the catalogue needs a placement before and after: a state that nobody sends or nobody "
            "takes would be silently fresh. Name it in both ownerships or take it out of the catalogue."
        )
