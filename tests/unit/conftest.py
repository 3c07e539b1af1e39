"""What tests share: real stores of two kinds for agreement, and the library that others read weights with."""

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


@pytest.fixture(scope="module")
def transformers():
    """Imported late: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import transformers  # noqa: PLC0415

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        yield transformers
