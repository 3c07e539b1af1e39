"""Counts that owe nothing to the code they check: bytes on the wire, memory that is alive, process groups."""

import weakref
from collections import Counter

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def registered_groups():
    """How many process groups torch knows in this process."""
    return len(c10d._world.pg_map)


class CountingTransport:
    """Counts the payload of every message that passes, by peer: moves travel as bytes, their checksums as int64."""

    def __init__(self, inner):
        self.inner, self.size, self.name, self.direct = inner, inner.size, inner.name, inner.direct
        self.sent, self.received = {}, {}

    def post(self, sends, receives):
        for messages, count in ((sends, self.sent), (receives, self.received)):
            for message in messages:
                if message.tensor.dtype == torch.uint8:
                    count[message.peer] = count.get(message.peer, 0) + message.tensor.nbytes
        return self.inner.post(sends, receives)

    def close(self):
        self.inner.close()


class Messages(TorchDispatchMode):
    """Counts what operations of this thread send over process groups of more than one rank, backward passes too.

    Attributes:
        calls: ``{(name of the group, kind): number}``; DTensor's own calls have torch's functional names.
        sent: bytes of the same, as they are handed over: what goes to this rank itself counts, what is received not.
        largest: most bytes of a storage that an operation gave.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.sent, self.largest = Counter(), Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # so that what it does inside is seen
        if func.namespace in {"c10d", "_c10d_functional"}:
            self._count(func.__name__.split(".")[0], args)
        found = func(*args, **kwargs or {})
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.untyped_storage().nbytes())
        return found

    def _count(self, kind, args):
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]  # behind the group, the kind of a sum
        if not boxed and not isinstance(args[-1], str):
            return  # a wait
        group = ProcessGroup.unbox(boxed[0]) if boxed else c10d._resolve_process_group(args[-1])
        if group.size() > 1:
            key = group.group_name, kind
            self.calls[key] += 1
            into_first = kind in {"alltoall_base_", "_allgather_base_", "_reduce_scatter_base_"}
            sent = () if kind == "recv_" else args[1] if into_first else args[0]
            self.sent[key] += sum(tensor.nbytes for tensor in tree_leaves(sent))


class Alive(TorchDispatchMode):
    """Sums up every storage that operations of this thread touch, for as long as it lives.

    Attributes:
        peak: most bytes alive at once.
    """

    def __init__(self, tensors):
        super().__init__()
        self.storages, self.born, self.peak = {}, [], 0
        self.see(list(tensors))
        self.born.clear()

    def see(self, found):
        fresh = [storage for storage in _storages(found) if self._get(storage._cdata) is None]
        if fresh:  # else nothing has grown
            self.storages |= {storage._cdata: weakref.ref(storage) for storage in fresh}
            self.born += [(storage._cdata, storage.nbytes()) for storage in fresh]
            self.peak = max(self.peak, self.held())

    def held(self):
        """Bytes alive now."""
        return sum(storage.nbytes() for key in self.storages if (storage := self._get(key)))

    def largest(self, pieces):
        """Bytes of the largest storage that was made meanwhile and is none of ``pieces``."""
        known = {storage._cdata for storage in _storages(list(pieces))}
        return max((size for key, size in self.born if key not in known), default=0)

    def _get(self, key):
        return self.storages[key]() if key in self.storages else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self.see((args, found))
        return found


def _storages(found):
    tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
    return [(t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
