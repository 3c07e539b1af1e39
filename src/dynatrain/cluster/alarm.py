"""How a rank hears, whatever it is at, that members of its world are lost.

The leading agent puts each loss up under a number. A thread of the rank waits for the next number inside the store, on
a connection of its own: that costs nothing while nothing happens, in worlds of any size, and it hears within
milliseconds. It then closes the connections of all process groups of this process, so that the training thread comes
out of whatever collective it is in, with an error, and lets whoever asks know what has happened.

The error comes first or the news does: a neighbour of a killed rank sees its connection closed milliseconds after, and
the agent has to hear of the end from the kernel, or, where another machine or its agent is gone, from silence. A rank
that waits for one that is halted has no error before the news.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, DistStoreError, Store

from dynatrain.cluster.summons import Summons

LOSSES = "losses"
"""Where on the run's store losses are counted."""

_WAIT = timedelta(hours=1)


def loss_key(number: int) -> str:
    """Where on the run's store loss ``number``, from 1, is put up."""
    return f"loss/{number}"


def put_up(store: Store, loss: Summons) -> None:
    """Ring the alarm of all ranks. Only one participant does.

    Args:
        store: the run's.
        loss: who is lost, and the world that is to follow.
    """
    number = int(store.add(LOSSES, 1))
    store.set(loss_key(number), loss.to_json())


class Alarm:
    """One rank's; see the module's text.

    Args:
        store: the run's.
        joins: whether the rank is a newcomer, which no loss before concerns: it may have been started for one.
        notice: seconds from a loss until the agents must have told of it.

    Attributes:
        notice: likewise.
    """

    def __init__(self, store: Store, *, joins: bool, notice: float = 0.0) -> None:
        self._store = store
        self.notice = notice
        self._seen = int(store.add(LOSSES, 0)) if joins else 0
        self._changed = threading.Condition()
        self._loss: Summons | None = None
        self._rings = False
        self._thread: threading.Thread | None = None

    def arm(self, release: Callable[[], None]) -> None:
        """Begin to listen, once; what came before is heard, too.

        Args:
            release: called in the listening thread for each loss before it is told of: has the training thread come out
                of what it waits in.
        """
        if self._thread is None:
            listener = self._store.clone()
            self._thread = threading.Thread(target=self._listen, args=(listener, release), name="alarm", daemon=True)
            self._thread.start()

    def beyond(self, generation: int) -> Summons | None:
        """The newest loss that leads to a later world than ``generation``; None where there is none."""
        loss = self._loss
        return loss if loss is not None and loss.generation > generation else None

    @property
    def rings(self) -> bool:
        """Whether connections are being closed at this moment: what raises now is no mistake of the loop's."""
        return self._rings

    def words(self, generation: int) -> str:
        """Why a world, or the crossing into it, cannot go on as it is; empty where it can."""
        loss = self.beyond(generation)
        return f"lost: {loss.why}" if loss else ""

    def wait(self, generation: int, seconds: float) -> Summons | None:
        """As :meth:`beyond`, once there is such a loss; None after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.beyond(generation), seconds)

    def _listen(self, store: Store, release: Callable[[], None]) -> None:
        while True:
            key = loss_key(self._seen + 1)
            try:
                store.wait([key], _WAIT)
                loss = Summons.from_json(store.get(key).decode())
            except DistStoreError:  # the hour is over
                continue
            except DistError:
                return  # without the store there is no world: the main thread meets the same
            self._seen += 1
            self._rings = True
            release()
            with self._changed:
                self._loss = loss
                self._rings = False
                self._changed.notify_all()
