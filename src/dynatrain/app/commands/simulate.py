"""``dynatrain simulate FROM TO --model M --cluster C``."""

from dataclasses import replace
from typing import Annotated, Literal

import tyro

from dynatrain.app.cli import Text, call
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.output import emit, say
from dynatrain.app.planned import change_of_model, in_chosen_order
from dynatrain.app.simulated import record, simulate_change, text
from dynatrain.layout.foreign import read_layout
from dynatrain.simulate.machines import Machines, read_machines
from dynatrain.space.presets import resolve_model

Model = Annotated[str, tyro.conf.arg(metavar="M")]
Cluster = Annotated[str, tyro.conf.arg(metavar="C")]
Rate = Annotated[float | None, tyro.conf.arg(metavar="GB/S")]


def run(words: list[str]) -> int:
    """The command."""
    return call(simulate, words)


def simulate(
    old: Text,
    new: Text,
    /,
    *,
    model: Model,
    cluster: Cluster,
    mode: Literal["keep", "tight"] = "keep",
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"] = "adamw",
    ranks_per_node: int | None = None,
    nvlink_gb_s: Rate = None,
    pcie_gb_s: Rate = None,
    nic_gb_s: Rate = None,
    node_nic_gb_s: Rate = None,
    rails: int | None = None,
    oversubscription: float | None = None,
    checksum_gb_s: Rate = None,
    round_bytes: int | None = None,
    choose_order: bool = False,
    json: bool = False,
) -> int:
    """What a change of layout would take on a cluster: seconds, floor, busiest link, peak memory. Trains nothing.

    State is in fp32. The seconds are those of moving state alone, out of a model of links that share their rates; it
    has been held against no GPU.

    Args:
        old: the layout before.
        new: the layout after.
        model: a preset, or a folder with a config.json.
        cluster: h100, a100, gb200, even50, ethernet, with its ranks (h100x64) or without, or a TOML file.
        mode: keep the old state to the commit, or hand it over tensor by tensor.
        optimizer: whose state is moved beside the parameters.
        ranks_per_node: in place of the cluster's own.
        nvlink_gb_s: of one rank within its node, one way, in place of the cluster's own; 0 for none.
        pcie_gb_s: of one rank to its host, in place of the cluster's own; 0 for no bound.
        nic_gb_s: of one rank to other nodes, in place of the cluster's own.
        node_nic_gb_s: of all ranks of a node to others, in place of the cluster's own.
        rails: networks side by side, in place of the cluster's own.
        oversubscription: how many times less the core carries than the cards, in place of the cluster's own.
        checksum_gb_s: hashed by one rank of what it sends and receives; without it, hashing is left out.
        round_bytes: bytes of whole tensors in one round of keep, in place of the planner's choice.
        choose_order: put the new layout's ranks in the order that moves fewest bytes, unless its text says an order.
        json: print one JSON object.
    """
    given = {
        "ranks_per_node": ranks_per_node,
        "nvlink_gb_s": nvlink_gb_s,
        "pcie_gb_s": pcie_gb_s,
        "nic_gb_s": nic_gb_s,
        "node_nic_gb_s": node_nic_gb_s,
        "rails": rails,
        "oversubscription": oversubscription,
        "checksum_gb_s": checksum_gb_s,
    }
    own = {name: value for name, value in given.items() if value is not None}
    shape, before, after, (machines, ranks) = all_of(
        lambda: resolve_model(model),
        lambda: read_layout(old),
        lambda: read_layout(new),
        lambda: _machines(cluster, own),
    )
    largest = max(before.world_size, after.world_size)
    if ranks is not None and largest > ranks:
        raise MistakeError(
            f"{cluster} has {ranks} ranks, and {largest} are needed; nearest: {cluster.rsplit('x', 1)[0]}x{largest}."
        )
    if round_bytes is not None and round_bytes < 1:
        raise MistakeError(f"--round-bytes is {round_bytes}; at least 1.")
    change = change_of_model(
        shape,
        (before, after),
        mode=mode,
        optimizer=optimizer,
        round_bytes=round_bytes or 0,
        ranks_per_node=machines.ranks_per_node,
    )
    if choose_order:
        change = in_chosen_order(change, shape.num_hidden_layers)
    found = simulate_change(change, machines)
    if json:
        emit({"model": model, "cluster": cluster, **record(change, machines, found)})
    else:
        say(*text(change, model, cluster, found))
    return 0 if found.verdict.ok else 1


def _machines(cluster: str, own: dict[str, float]) -> tuple[Machines, int | None]:
    machines, ranks = read_machines(cluster)
    return replace(machines, **own), ranks
