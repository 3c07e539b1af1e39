"""The store in which a run meets. It lives in an agent, never in a training rank, and outlives any of them."""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from dynatrain.cluster.context import RankContext
from dynatrain.cluster.place import PlaceError

_TIMEOUT = timedelta(seconds=20)


def host_store(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Start a store that listens on one address alone.

    The socket is bound before anyone is told its port: a port that is chosen first may be taken when it is used.

    Args:
        host: the address; by default, which this machine alone can reach.
        port: its port; 0 for one that the kernel chooses.

    Raises:
        PlaceError: nobody can listen there.
    """
    try:
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise PlaceError(
            f"The run's store cannot listen at {host}:{port}: {error.strerror or error}. Nearest: an address of this "
            "machine, and a port that is free."
        ) from None
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int) -> TCPStore:
    """Connect to a store that somebody else hosts."""
    return TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)


def prefix(nonce: str) -> str:
    """What every key of one run begins with."""
    return f"dynatrain/{nonce}"


def rank_stores(context: RankContext) -> tuple[Store, Store]:
    """A rank's two connections: one for the board, one to make process groups with.

    Two, because a process group waits inside the store for its peers, and whoever shares its connection waits with it:
    the heart would stop.
    """
    board, groups = (join_store(context.store_host, context.store_port) for _ in range(2))
    return PrefixStore(context.store_prefix, board), PrefixStore(f"{context.store_prefix}/groups", groups)
