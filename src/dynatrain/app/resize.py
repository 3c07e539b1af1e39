"""Which layout a run has in a world of another size: what ``scale`` shows, and what the agent carries out."""

from dynatrain.app.plan_text import show
from dynatrain.app.planned import Change, change_of_model
from dynatrain.app.runs import RunWorld
from dynatrain.layout.foreign import read_layout
from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.resize import resized
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.space.run_check import CheckedRun, sizes_of


def layout_of_size(run: CheckedRun, present: str, size: int, named: str) -> str:
    """The layout of ``size`` ranks that follows the present one: ``named``, or where that is empty the nearest.

    Args:
        run: whose.
        present: layout, as text.
        size: ranks that there are to be.
        named: layout, as text; torchtitan's and Megatron's spellings count, too.

    Raises:
        LayoutError: the run may not have that size, or no such layout; with every rule and the nearest choices.
    """
    sizes = sizes_of(run.config)
    if named:
        if problem := sizes.problem(size):
            raise LayoutError(f"{size} ranks cannot be", (problem,))
        return print_layout(legal(run, named, size))
    found = resized(
        parse_layout(present),
        run.shape.limits(),
        world_size=size,
        **run.given,
        sizes=sizes,
        moved=lambda new: change_of_run(run, parse_layout(present), new, "keep").bytes_moved,
    )
    return print_layout(resolve(found, run.shape.num_hidden_layers))


def legal(run: CheckedRun, text: str, size: int) -> Layout:
    """A layout that the run can have in a world of ``size`` ranks, its pipeline split resolved.

    Raises:
        LayoutError: every rule that it breaks, and the nearest legal layouts.
    """
    return run.legal(read_layout(text), size)


def dry_run_of(run: CheckedRun, world: RunWorld, new: Layout, mode: str, *, json: bool) -> None:
    """Print what a change from the present layout would move and need; ``mode`` may be ``configured``."""
    wanted = run.config.switching.mode if mode == "configured" else mode
    old = parse_layout(world.layout)
    change = change_of_run(run, old, new, "keep" if wanted == "auto" else wanted, world.ranks_per_node)
    show(change, run.config.model.config, wanted, json=json)


def change_of_run(
    run: CheckedRun,
    old: Layout,
    new: Layout,
    mode: str,
    ranks_per_node: int | None = None,
    holders: tuple[int, ...] = (),
) -> Change:
    """What a change of a run's layout moves and needs.

    Args:
        run: whose.
        old: the layout before.
        new: the layout after.
        mode: ``keep`` or ``tight``.
        ranks_per_node: as for the planner.
        holders: the holder that each new rank is; by default, the one of the same number.
    """
    return change_of_model(
        run.shape,
        (old, new),
        members=holders,
        mode=mode,
        dtype="float64" if run.config.precision.compute == "fp64" else "float32",
        optimizer=run.config.optimizer.name,
        budget_bytes=run.config.switching.budget_mib << 20,
        ranks_per_node=ranks_per_node,
    )
