"""How a loop gives an inference engine its weights."""

from dynatrain.train.parking import Parking
from dynatrain.train.publisher import EngineTarget, Publisher
from dynatrain.train.publishing import PublishError, Publishing
from dynatrain.train.world import World


class Publishes:
    """What a ``Switcher`` has to do with engines."""

    _parking: Parking
    _publisher: Publisher
    _inside: bool
    _next_step: int
    world: World

    def publish(self, target: EngineTarget, *, changes: bool = False) -> Publishing:
        """Give an inference engine the weights as they are now, while training goes on. All ranks call it.

        It may be called before the first step, and before or behind a whole step in the loop. The weights are copied
        beside the next forward and backward, in the engine's dtype; its ranks fetch what they need from the ranks that
        have it. The engine serves its old version until the new one is there and has the right digests; whatever goes
        wrong before leaves it with that. The version is the number of the step before which the weights were taken. A
        publish that is still under way is waited for first.

        Args:
            target: the engine.
            changes: send only elements whose bits have changed since what this target was given last, where that is
                what it serves and the layout is still the same; else all. What is sent is then kept in host memory for
                the next time. A later publish without it sends all, whatever the engine has.

        Returns:
            The publish under way; ``wait()`` gives what it has brought about, or raises ``PublishError``.

        Raises:
            PublishError: the step under way has begun and not been made.
        """
        self._parking.require_here("publish")
        if self._inside and self.world.pending.waits:
            raise PublishError("a step is under way: publish comes before its first forward or behind its update")
        return self._publisher.publish(self.world, self._next_step, target, changes=changes)
