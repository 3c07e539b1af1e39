"""Real processes as ranks: forked, one thread each, with results handed back."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


class World:
    """What one forked rank has to meet the others: a store, groups from it, votes through it."""

    def __init__(self, rank, size, port):
        self.rank, self.size = rank, size
        self.store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=20))

    def group(self, name):
        store = dist.PrefixStore(name, self.store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timedelta(seconds=20))

    def vote(self, name, yes, seconds=4):
        """Whether all ranks say yes; known as soon as one says no."""
        self.store.set(f"{name}/{self.rank}", "yes" if yes else "no")
        deadline, missing = time.monotonic() + seconds, set(range(self.size))
        while missing and time.monotonic() < deadline:
            said = {rank: self.store.get(f"{name}/{rank}") for rank in missing if self.store.check([f"{name}/{rank}"])}
            if b"no" in said.values():
                return False
            missing -= set(said)
            time.sleep(0.002)
        return not missing


def run(size, work, seconds=25, silent=()):
    """``work(world)`` in ``size`` forked processes; results, or None where a process died, hung or is ``silent``."""
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    ports = context.SimpleQueue()

    def body(rank):
        torch.set_num_threads(1)
        gc.freeze()  # as the agent's ranks: the collector would look through all that pytest has imported
        faulthandler.dump_traceback_later(seconds - 2, file=sys.__stderr__)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            result = work(World(rank, size, ports.get()))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result = RuntimeError(f"{type(error).__name__}: {error}")
        ends[rank][1].send_bytes(pickle.dumps(result))
        ends[rank][1].close()
        os._exit(0)  # destroying groups of a broken world could wait

    processes = [context.Process(target=body, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    # Only now: a child forked beside the server's thread could inherit a lock that the thread holds.
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for _, end in ends:
        ports.put(server.port)
        end.close()
    deadline, found = time.monotonic() + seconds, []
    for rank, (end, _) in enumerate(ends):
        try:
            came = rank not in silent and end.poll(max(0, deadline - time.monotonic()))
            found.append(pickle.loads(end.recv_bytes()) if came else None)  # noqa: S301 - our own child
        except EOFError:
            found.append(None)
    for process in processes:
        process.kill()
        process.join()
    return found
