"""``torch.compile`` of each transformer block.

Blocks are cut by tp as DTensors, whose backward torch cannot compile, and it compiles no backward in two halves, as
zero-bubble schedules run it; such blocks stay eager. Of a compiled block, what
torch cannot hold in a graph, or would compile anew at each step, stays eager too: masks of dropout, which are keyed by
the step; attention that sends messages, or drops; experts, whose rows are as many as come.

Blocks of one kind share their code, so one is compiled for all of them; and nothing that is compiled knows a layout or
its process groups. Code that was compiled is kept by torch with what it was compiled for: sizes of micro-batches and
shares of tokens. So a layout that comes again finds all of its code.
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn

from dynatrain.layout.layout import Layout
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.experts import MixtureOfExperts
from dynatrain.models.keyed import KeyedDropout


def compile_blocks(part: DecoderPart, layout: Layout, backend: str) -> None:
    """Compile every block of ``part``, when it first runs; before checkpointing and ``fully_shard``.

    Args:
        part: its blocks are replaced; their parameters keep their canonical names.
        layout: blocks that tp cuts, or whose backward comes in halves, are left alone.
        backend: of ``torch.compile``; empty for none.
    """
    if not backend or layout.size("tp") > 1 or layout.schedule:
        return
    for number, block in list(part.layers.items()):
        for module in _eager(block, sends=layout.size("cp") > 1):
            module.forward = torch.compiler.disable(module.forward)
        # One size each, not one code for all sizes: their number is that of the layouts.
        part.layers[number] = torch.compile(block, backend=backend, dynamic=False)


def compile_seconds() -> float:
    """Seconds that this process has spent in compiling so far."""
    found = sys.modules.get("torch._dynamo.utils")  # which takes long to import, and who compiles has
    return float(found.calculate_time_spent()["total_wall_time"]) if found else 0.0


def _eager(block: nn.Module, *, sends: bool) -> Iterator[nn.Module]:
    """The modules inside a block that stay out of the graph."""
    if sends or block.self_attn.drop.p:
        yield block.self_attn
    for module in block.modules():
        if isinstance(module, MixtureOfExperts) or (isinstance(module, KeyedDropout) and module.p):
            yield module
