"""What a switch is measured against: the ways in which PyTorch alone takes state from one layout to another.

Each takes the live tensors of one world and fills the tensors of another. None of them is used by a switch.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dynatrain.layout.layout import MESH_AXES
from dynatrain.space.box import within
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue
from dynatrain.train.torch_private import local_tensor

Held = Mapping[tuple[str, str], torch.Tensor]
"""``{(tensor, state): DTensor or plain tensor}``: all that a rank holds."""

Method = Callable[[], None]


class CannotError(ValueError):
    """A method has no way between these two layouts; the text says why."""


def dcp_save(held: Held, folder: Path) -> None:
    """Write everything to ``folder``, every element once. Collective over the default group."""
    dcp.save(_flat(held), checkpoint_id=folder, no_dist=False)


def dcp_load(held: Held, folder: Path) -> None:
    """Read everything from ``folder`` into given tensors, whatever layout wrote it. Collective likewise."""
    dcp.load(_flat(held), checkpoint_id=folder, no_dist=False)


def through_files(source: Held, target: Held, folder: Path) -> None:
    """Save, then load."""
    dcp_save(source, folder)
    dcp_load(target, folder)


def remove(folder: Path) -> None:
    """Give the files' memory back. Collective: nobody reads any more when it returns."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def through_whole_tensors(source: Held, target: Held, catalogue: Catalogue, new: Ownership) -> None:
    """Gather each tensor whole on every rank, and keep the slice that the new layout wants.

    Raises:
        CannotError: a rank lacks tensors of other stages, so it cannot take part in gathering them.
    """
    for tensor in catalogue:
        box = new.box(tensor, dist.get_rank())
        for state in tensor.states:
            value = source.get((tensor.name, state.name))
            if value is None:
                raise CannotError("the old layout has stages: a rank can gather the tensors of its own stage alone")
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if box is not None:
                there = local_tensor(target[tensor.name, state.name])
                there.copy_(whole if state.scalar else whole[within(box, tuple((0, size) for size in tensor.shape))])


def through_redistribute(source: Held, target: Held, meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    """``DTensor.redistribute`` on one mesh, to which rows over one axis alone are relabelled without moving.

    Args:
        source: what a rank holds.
        target: what it is to hold.
        meshes: before and after, with all axes.

    Raises:
        CannotError: there is no one mesh that both layouts can be written on, or torch cannot do it there.
    """
    flat = [mesh.size(MESH_AXES.index("fsdp")) == mesh.size() for mesh in meshes]
    if source.keys() != target.keys():
        raise CannotError("tensors change stages: redistribute works on one mesh of ranks that all hold them")
    if not any(flat):
        raise CannotError("neither layout is fsdp alone, so that there is no one mesh for both")
    on = meshes[flat[0]]
    for key, value in source.items():
        there = target[key]
        if not isinstance(value, DTensor) or not isinstance(there, DTensor):
            there.copy_(value)
            continue
        frm = _over_all(on, value) if flat[0] else _on(on, value)
        to = _on(on, there) if flat[0] else _over_all(on, there)
        local = local_tensor(value)
        here = DTensor.from_local(local, on, frm, run_check=False, shape=value.shape, stride=value.stride())
        try:
            moved = here.redistribute(on, to)
        except (RuntimeError, IndexError) as error:
            raise CannotError(f"torch cannot take {frm} to {to}: {type(error).__name__}: {error}") from error
        local_tensor(there).copy_(local_tensor(moved))


def _on(mesh: DeviceMesh, value: DTensor) -> tuple[Placement, ...]:
    """The placements of ``value`` on a mesh that has its own axes, and more; experts and copied heads lie on others."""
    own = dict(zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True))
    names = mesh.mesh_dim_names or ()
    if other := [axis for axis, placement in own.items() if axis not in names and not placement.is_replicate()]:
        raise CannotError(f"a tensor is cut over {', '.join(other)}, on a mesh of its own")
    return tuple(own.get(axis, Replicate()) for axis in names)


def _over_all(mesh: DeviceMesh, value: DTensor) -> tuple[Placement, ...]:
    """Rows over all axes, outermost first: what rows over one axis are on another mesh, where they divide evenly."""
    if value.shape[0] % mesh.size():
        raise CannotError("rows do not divide evenly, and DTensor cuts them otherwise over two axes than over one")
    return tuple(Shard(0) if mesh.size(dim) > 1 else Replicate() for dim in range(mesh.ndim))


def _flat(held: Held) -> dict[str, torch.Tensor]:
    return {f"{tensor}/{state}": value for (tensor, state), value in held.items()}
