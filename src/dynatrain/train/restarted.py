"""What a rank does that begins anew under torchrun: build the model, load the checkpoint with DCP, be ready."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from dynatrain.execute.census import compare
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.train.baselines import dcp_load
from dynatrain.train.bench_state import bind, digests, forget_peak, resident, room
from dynatrain.train.groups import Connections, GroupPool, building
from dynatrain.train.live import entries
from dynatrain.train.optimizer import OptimizerSettings, optimizer_of
from dynatrain.train.parallel import Precision, build_parts
from dynatrain.train.restart_order import CHECKPOINT, Begun, Order
from dynatrain.train.torch_private import default_store

GROUP_SECONDS = 300.0


def begin(order: Order, folder: Path) -> Begun:
    """Make the default group out of torchrun's environment, and begin as ordered from the checkpoint in ``folder``."""
    imported = time.perf_counter()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layout = resolve(parse_layout(order.layout), order.shape.num_hidden_layers)
    store = dist.PrefixStore("groups", default_store())
    groups = GroupPool(Connections(store), rank=rank, world="restarted", backend="gloo", timeout_seconds=GROUP_SECONDS)
    mesh = groups.mesh(layout, "cpu")
    with building(groups, layout, "cpu"), torch.device("meta"):
        parts = build_parts(order.shape, layout, mesh, seed=1, precision=Precision())
        optimizer = optimizer_of(parts, OptimizerSettings())
    found = entries(parts, canonical_name)
    built = time.perf_counter()
    forget_peak()
    before = resident("VmRSS")
    held = room(found, touched=False)
    with torch.no_grad():
        dcp_load(held, folder / CHECKPOINT)
        bind(parts, found, optimizer, held)
    ready = time.perf_counter()
    peak = resident("VmHWM") - before
    saved, loaded = torch.tensor(order.digests), digests(held, order.catalogue, order.new)
    arrived = compare(saved, loaded, order.catalogue, order.old, order.new).equal
    dist.destroy_process_group()
    return Begun(imported=imported, built=built, ready=ready, peak_bytes=peak, arrived=arrived)
