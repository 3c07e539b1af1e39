"""What tests of agreement share: real stores, of two kinds."""

import functools
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from dynatrain.cluster.store import host_store, join_store


@pytest.fixture(params=["hash", "tcp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Store]]:
    """Gives each participant a connection of its own, the same each time: torch asks DNS for every new one."""
    if request.param == "hash":
        store = HashStore()
        yield lambda _=0: PrefixStore("run", store)
    else:
        server = host_store()
        yield functools.cache(lambda _=0: PrefixStore("run", join_store("127.0.0.1", server.port)))
