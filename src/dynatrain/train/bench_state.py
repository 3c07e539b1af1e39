"""State in a bench, by name: what a rank holds, room for it in another layout, and a model that takes it over."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dynatrain.execute.census import digest_vector
from dynatrain.execute.pages import give_up_spare, mapped_apart
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue
from dynatrain.train.adopt import adopt, shard_like, whole_storage
from dynatrain.train.baselines import Held
from dynatrain.train.live import Entry
from dynatrain.train.states import optimizer_states
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


def held_by(world: World) -> Held:
    """Everything that a rank holds, as the distributed tensors that the loop has."""
    held = {(name, entry.kind): entry.value.detach() for name, entry in world.found.items()}
    for name, values in optimizer_states(world.optimizer, world.found).items():
        held |= {(name, state.name): value for state, value in values.items()}
    return held


def room(found: Mapping[str, Entry], *, touched: bool) -> Held:
    """New tensors for everything that a rank is to hold.

    Args:
        found: the tensors of its model, which was built on meta.
        touched: whether to fill them with NaN, so that no page is new to who writes next. What is large has pages of
            its own in any case: no state of before is found there.
    """
    made: dict[tuple[str, str], torch.Tensor] = {}
    with mapped_apart():
        for name, entry in found.items():
            numel = local_tensor(entry.value).numel()
            for state, size in ((entry.kind, entry.stored), *((moment, numel) for moment in MOMENTS)):
                made[name, state] = shard_like(entry.value, torch.empty(size, dtype=entry.value.dtype)).detach()
            made[name, "step"] = torch.empty(())
    if touched:
        for value in made.values():
            whole_storage(local_tensor(value)).fill_(torch.nan)
    return made


def bind(parts: Sequence[nn.Module], found: Mapping[str, Entry], optimizer: torch.optim.Optimizer, held: Held) -> None:
    """Give a model that was built on meta, and its optimizer, the state that :func:`room` was made for; no copies."""
    flats = {name: whole_storage(local_tensor(held[name, entry.kind])) for name, entry in found.items()}
    for name, entry in adopt(parts, found, flats, [optimizer]).items():
        optimizer.state[entry.value] = {state: held[name, state] for state in (*MOMENTS, "step")}


def digests(held: Held, catalogue: Catalogue, owner: Ownership) -> torch.Tensor:
    """Of what all ranks hold under ``owner``, one vector on all ranks. Collective over the default group."""
    rank = dist.get_rank()
    pieces: Pieces = {}
    for index, tensor in enumerate(catalogue):
        for number, state in enumerate(tensor.states):
            value, box = held.get((tensor.name, state.name)), owner.box(tensor, rank)
            if value is not None and box is not None:
                pieces[index, number] = Piece(local_tensor(value), state.box(box, tensor.shape))
    vector = digest_vector(pieces, catalogue, owner, owner, rank)
    dist.all_reduce(vector)
    return vector


def resident(field: str) -> int:
    """Resident bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Have the kernel count the most resident bytes anew: exact, where sampling would miss short peaks.

    What the C library keeps for later goes back to the system first, so that what is resident is in use.
    """
    give_up_spare()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
