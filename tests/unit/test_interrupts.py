import os
import signal
import time

import pytest

from dynatrain.cluster import interrupts
from dynatrain.cluster.interrupts import Interrupts

pytestmark = pytest.mark.clock


@pytest.fixture(autouse=True)
def _as_it_was():
    """Who was told to end by SIGTERM no longer listens to it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_signals_that_come_together_are_one_wish_and_a_later_one_is_a_second(monkeypatch) -> None:
    monkeypatch.setattr(interrupts, "SAME_SECONDS", 0.2)
    with Interrupts() as received:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert received.received == [signal.SIGTERM]
        time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received.received == [signal.SIGTERM, signal.SIGTERM]


def test_who_was_told_to_end_is_not_ended_by_being_told_again() -> None:
    with Interrupts():
        pass
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    with Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
