"""The door of a run: how agents come in that were not there when it began, and why others do not.

Who wants in writes a claim into the run's store, under a prefix that everybody knows, and seals it with the run's
secret. The agent that leads answers it, between two changes of members: with what an agent has to know, or with a
reason, which it writes into the run's events as well. A claim without the seal is a stranger's.

The seal keeps out who has come to the wrong run, or has no business here and means no harm. It is no defence against
who does: whoever can open a connection to the store can read and write all of it (``docs/threats.md``).
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import PrefixStore, Store

from dynatrain.cluster.board import Board
from dynatrain.cluster.claim import Admission, Claim, opened, sealed
from dynatrain.cluster.place import PlaceError

_POLL_SECONDS = 0.1
_LONGEST = 1 << 16
_LOOKS = 25  # at a number without a text, some seconds; then the next one's turn comes


class Door:
    """The leading agent's side.

    Args:
        store: the run's, without the run's prefix.
        secret: of the run.
    """

    def __init__(self, store: Store, secret: str) -> None:
        self._store = PrefixStore("dynatrain/door", store)
        self._board = Board(self._store, 1)
        self._secret = secret
        self._next = 0
        self._looked = 0  # how often there was no text under that number

    def look(self) -> Claim | str | None:
        """The oldest claim that has no answer; why it is none, where it is none; None where nobody knocks."""
        if self._next >= int(self._store.add("claims", 0)):
            return None
        text = self._board.peek(f"claim/{self._next}")
        if text is None:  # its number is drawn, its text not there yet; never, where its writer was killed in between
            self._looked += 1
            if self._looked > _LOOKS:
                self._pass_on()
            return None
        if note := _note_in(text):
            return note
        body = opened(self._secret, self._next, "claim", text[:_LONGEST])
        if body is None:
            return "whoever it is does not have the run's token; dynatrain join RUN finds it in the run's folder"
        try:
            return Claim.from_json(body)
        except (ValueError, TypeError):
            return "its claim cannot be read: it is of another version"

    def admit(self, admission: Admission) -> None:
        """Let the one in that was looked at last."""
        self._answer(json.dumps({"message": sealed(self._secret, self._next, "answer", admission.to_json())}))

    def refuse(self, reason: str) -> None:
        """Tell the one that was looked at last why it does not come in."""
        self._answer(json.dumps({"refused": reason}))

    def _answer(self, text: str) -> None:
        self._board.post(f"answer/{self._next}", text)
        self._store.delete_key(f"claim/{self._next}")
        self._pass_on()

    def _pass_on(self) -> None:
        self._next, self._looked = self._next + 1, 0


def _note_in(text: str) -> str:
    """What an agent has left that was refused elsewhere; empty where the text is another."""
    try:
        return str(json.loads(text)["told"])[:500]
    except (ValueError, KeyError, TypeError):
        return ""


def knock_in_vain(store: Store, why: str, who: Mapping[str, Any]) -> None:
    """Let the run know that an agent was refused already, by its own rules."""
    door = PrefixStore("dynatrain/door", store)
    number = int(door.add("claims", 1)) - 1
    door.set(f"claim/{number}", json.dumps({"told": f"process {who['pid']} on {who['host']}: {why}"}))


def knock(store: Store, secret: str, claim: Claim, timeout: float, pause: Callable[[float], None]) -> Admission:
    """Ask to come in, and wait for the answer.

    Args:
        store: the run's.
        secret: of the run, as this agent was told it.
        claim: what it says.
        timeout: seconds.
        pause: sleeps between two looks; may raise to end the waiting.

    Raises:
        PlaceError: it is refused, or nobody answers.
    """
    door = PrefixStore("dynatrain/door", store)
    number = int(door.add("claims", 1)) - 1
    door.set(f"claim/{number}", sealed(secret, number, "claim", claim.to_json()))
    end = time.monotonic() + timeout
    while (text := Board(door, 1).peek(f"answer/{number}")) is None:
        if time.monotonic() > end:
            raise PlaceError(f"The run has not answered within {timeout:g} s; see dynatrain status.")
        pause(_POLL_SECONDS)
    door.delete_key(f"answer/{number}")
    found = json.loads(text)
    if "refused" in found:
        raise PlaceError(f"Not admitted to the run: {found['refused']}.")
    body = opened(secret, number, "answer", found["message"])
    if body is None:
        raise PlaceError("Not admitted: who answers there is not the run whose token was given.")
    return Admission.from_json(body)
