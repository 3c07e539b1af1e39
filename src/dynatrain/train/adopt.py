"""Values put into freshly built modules: each parameter takes over the storage that the switch filled for it.

Nothing is copied: the storage is handed in by ``load_state_dict(assign=True)`` before the first forward.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dynatrain.execute.pieces import Pieces
from dynatrain.plan.plan import Granule
from dynatrain.train.live import Entry
from dynatrain.train.torch_private import local_tensor, set_buffer, shard_of
from dynatrain.train.torch_private_fsdp import adopt_padded
from dynatrain.train.world import World


def adopt(
    parts: Sequence[nn.Module],
    found: Mapping[str, Entry],
    flats: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, Entry]:
    """Give every tensor of ``parts`` its storage, and the optimizers the parameters that result.

    Args:
        parts: built on meta; mutated.
        found: their entries, as read on meta.
        flats: by canonical name: one-dimensional storage of ``Entry.stored`` elements, on the device; its front part
            becomes the local shard. Owned by the modules from here on.
        optimizers: made over the parameters of all entries there are; their groups are repointed.

    Returns:
        The entries of the same tensors, with the values that the modules now hold.
    """
    owned: dict[nn.Module, dict[str, torch.Tensor]] = {}
    flat_by_part: list[dict[str, torch.Tensor]] = [{} for _ in parts]
    made: dict[int, torch.Tensor] = {}
    result: dict[str, Entry] = {}
    for name, entry in found.items():
        value = _like(entry.value, flats[name])
        made[id(entry.value)] = value
        result[name] = replace(entry, value=value)
        for number, path in entry.paths:
            owner, _, leaf = path.rpartition(".")
            module = parts[number].get_submodule(owner)
            if entry.kind == "param":
                owned.setdefault(module, {})[leaf] = value
                flat_by_part[number][path] = flats[name]
            else:
                set_buffer(module, leaf, value)
    for part, flat in zip(parts, flat_by_part, strict=True):
        adopt_padded(part, flat)
    for module, values in owned.items():
        # Module by module, since checkpoint wrappers rename the keys of a whole part; hence not strict. A key that is
        # not taken leaves its parameter on meta, which the first forward refuses.
        module.load_state_dict(values, strict=False, assign=True)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(id(param), param) for param in group["params"]]
    return result


def adopt_ahead(old: World, new: World, targets: Pieces, adopted: Iterable[Granule]) -> None:
    """Give the new modules the storage that they will have, before anything has arrived in it.

    Parameters that stay where they are keep theirs. What turns out to lie elsewhere in the quiet is mended by
    :func:`dynatrain.train.install.bind`.

    Args:
        old: the world that trains, beside this.
        new: built on meta; mutated.
        targets: of what will arrive.
        adopted: granules that stay.
    """
    held = {granule: piece.tensor for granule, piece in targets.items()}
    for index, number in adopted:
        entry = old.found[old.where[old.catalogue[index].name][0]]
        if old.catalogue[index].states[number].name == entry.kind == "param":  # a buffer may be another one by then
            held[index, number] = local_tensor(entry.value)
    flats = {}
    for (index, number), value in held.items():
        tensor = new.catalogue[index]
        name, slot = new.where[tensor.name]
        if tensor.states[number].name == new.found[name].kind and (slot is None or slot.number == 0):
            flats[name] = whole_storage(value)
    new.found |= adopt(new.parts, {name: new.found[name] for name in flats}, flats, [new.optimizer])


def adopt_rest(
    parts: Sequence[nn.Module],
    found: Mapping[str, Entry],
    flats: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, Entry]:
    """As :func:`adopt`, of what does not lie in its storage already; all entries."""
    rest = {name: entry for name, entry in found.items() if not _lies_in(entry.value, flats[name])}
    return {**found, **adopt(parts, rest, flats, optimizers)}


def _lies_in(value: torch.Tensor, flat: torch.Tensor) -> bool:
    local = local_tensor(value)
    return not local.is_meta and local.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage under ``tensor``, one-dimensional, in its dtype."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.itemsize,)
    )


def _like(template: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    value = shard_like(template, flat)
    if isinstance(template, nn.Parameter):
        made = nn.Parameter(value, requires_grad=template.requires_grad)
        made.__dict__.update(template.__dict__)  # what build has noted on it, as Megatron's ``partition_dim``
        return made
    return value


def shard_like(template: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A tensor laid out over ranks like ``template``, over the front part of this rank's ``flat`` storage."""
    if not isinstance(template, DTensor):
        return flat[: template.numel()].view(template.shape)
    shape = local_tensor(template).shape
    return shard_of(template, flat[: shape.numel()].view(shape))
