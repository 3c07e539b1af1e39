"""Which layouts a loop may switch to: what its world allows, and what its gradient reduction means."""

import itertools
from collections.abc import Callable

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import EXPERT_AXES, Layout
from dynatrain.layout.nearest import ranked
from dynatrain.layout.text import parse_layout, print_layout, short_layout
from dynatrain.train.groups import axis_members
from dynatrain.train.live import UnplacedTensorError
from dynatrain.train.party import DataParallel, Party
from dynatrain.train.torch_private_fsdp import fsdp_reductions, takes_means
from dynatrain.train.world import World

Read = Callable[[str, int], Layout]
"""``read(text, world_size)``: a layout for a world of so many ranks; raises :class:`LayoutError` where the job cannot
have it."""

_WAYS_OUT = (
    "if the loop cuts one global batch into equal shares by sw.layout.data_ranks, say "
    "Switcher(data_parallel='free'); if it normalises by itself, set the divide factor of every FSDP module in build; "
    "if it reduces gradients by itself, say data_parallel='own'"
)


def _unknown(layout: Layout) -> list[str]:
    """What a build must know of, so that it is taken for granted of none."""
    parts = [f"{axis}{layout.size(axis)}" for axis in ("cp", *EXPERT_AXES) if layout.size(axis) > 1]
    parts += [f"v{layout.chunks}"] if layout.chunks > 1 else []
    parts += [f"-{layout.schedule}"] if layout.schedule else []
    return [
        f"{part} needs a build that knows it: say so by reading layouts yourself, Switcher(legal=...)" for part in parts
    ]


def whole_world(text: str, world_size: int) -> Layout:
    """Read a layout that uses every rank, of those that any build can be trained in.

    Raises:
        LayoutError: with every problem, and the nearest that can be used.
    """
    layout = parse_layout(text)
    problems = _unknown(layout)
    if layout.world_size != world_size:
        problems.append(f"it is a layout of {layout.world_size} ranks, the world has {world_size}")
    if problems:
        able = (other for other in ranked(layout, world_size) if not _unknown(other))
        near = tuple(print_layout(other) for other in itertools.islice(able, 3))
        raise LayoutError(f"{text} cannot be used here", tuple(problems), near)
    return layout


def served(read: Read, world: Callable[[], World]) -> Read:
    """``read``, without the layouts that a registered object cannot serve.

    Args:
        read: reads what is allowed otherwise.
        world: the present one. Of its registered objects, one that has ``check_layout(layout)`` raises
            :class:`LayoutError` from it for a layout that it refuses, on every rank alike.
    """

    def careful(text: str, world_size: int) -> Layout:
        layout = read(text, world_size)
        for thing in world().objects.values():
            if hasattr(thing, "check_layout"):
                thing.check_layout(layout)
        return layout

    return careful


def same_meaning(read: Read, world: World, data_parallel: DataParallel) -> Read:
    """``read``, without the layouts in which a mean over data ranks would be another number.

    FSDP2's own reduction averages over the data ranks (dp x fsdp). While each of them brings a batch of its own, their
    number is part of the loop's mathematics: the global batch. A loop that cuts one global batch into equal shares
    by ``layout.data_ranks`` says so with ``free``. A loop that sets its own divide factor has taken the matter into
    its hands, as the built-in trainer does, and may go anywhere.

    Args:
        read: reads what is allowed otherwise.
        world: in which the loop begins; one that trains nothing may go anywhere.
        data_parallel: what the loop says of itself.
    """
    means = [found for part in world.parts if (found := takes_means(part)) is not None]
    if data_parallel != "fixed" or not world.trains or (means and not any(means)):
        return read

    first = world.layout

    def careful(text: str, world_size: int) -> Layout:
        layout = read(text, world_size)
        if layout.data_ranks != first.data_ranks:
            seen = (
                f"it has {layout.data_ranks} data ranks (dp x fsdp), {short_layout(first)} has {first.data_ranks}, "
                "and the loop's gradients are means over them"
            )
            same = (other for other in ranked(layout, world_size) if other.data_ranks == first.data_ranks)
            raise LayoutError(
                f"{short_layout(layout)} would change what this loop computes",
                (seen, _WAYS_OUT),
                tuple(map(print_layout, itertools.islice(same, 3))),
            )
        return layout

    return careful


def require_reduced(party: Party, world: World, before: World | None = None) -> None:
    """Refuse a layout in which FSDP2 leaves gradients of trained parameters unreduced over some of the data ranks.

    A build that overlooks dp still trains, each replica for itself. FSDP2 is relied on for what it manages here, and
    for what it managed in the layout ``before``. A reduction hook of the user's is taken at its word.

    Args:
        party: this rank in that world; ``data_parallel="own"`` says that the loop reduces by itself.
        world: freshly built.
        before: the one that trains; None at the start.

    Raises:
        UnplacedTensorError: all such parameters, by name.
    """
    layout = world.layout
    if party.data_parallel == "own":
        return
    # Along with cp or experts, fsdp is read otherwise by some of the tensors; their builds are known to be right.
    axes = ("dp", "fsdp") if layout.size("cp") == layout.ep == layout.etp == 1 else ("dp",)
    members = {axis: set(axis_members(layout, axis, party.rank)) for axis in axes if layout.size(axis) > 1}
    relied = _reduced(before) if before is not None and before.layout.data_ranks > 1 else {}
    here, problems = _reduced(world), []
    for name, entry in world.found.items():
        if not entry.value.requires_grad or here.get(name, ()) is None or (name not in here and name not in relied):
            continue
        over = [set(ranks) for ranks in here.get(name) or ()]
        if lacking := [axis for axis, ranks in members.items() if not any(ranks <= one for one in over)]:
            problems.append(f"{name}: nothing reduces its gradient over {' and '.join(lacking)}")
    if problems:
        raise UnplacedTensorError(
            f"{'; '.join(problems)}; in {short_layout(layout)} each of them has data of its own. Give fully_shard "
            "mesh['dp', 'fsdp'], or say Switcher(data_parallel='own') where the loop itself reduces"
        )


def _reduced(world: World) -> dict[str, tuple[tuple[int, ...], ...] | None]:
    """:func:`fsdp_reductions` by canonical name."""
    by_id = {key: axes for part in world.parts for key, axes in fsdp_reductions(part).items()}
    return {name: by_id[id(entry.value)] for name, entry in world.found.items() if id(entry.value) in by_id}
