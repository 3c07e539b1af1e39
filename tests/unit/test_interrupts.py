import os
import signal
import time

from dynatrain.cluster import interrupts
from dynatrain.cluster.interrupts import Interrupts


def test_signals_that_come_together_are_one_wish_and_a_later_one_is_a_second(monkeypatch) -> None:
    monkeypatch.setattr(interrupts, "SAME_SECONDS", 0.2)
    with Interrupts() as received:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert received.received == [signal.SIGTERM]
        time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received.received == [signal.SIGTERM, signal.SIGTERM]
