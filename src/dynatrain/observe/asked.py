"""What a program has asked of its run, and hears later."""

from dataclasses import dataclass
from pathlib import Path

from dynatrain.observe.requests import Answer, read_answer, wait_answer

_DONE = ("done", "unchanged")


class NotDoneError(RuntimeError):
    """What was asked for did not happen; the run goes on as before, unless the answer says that it has ended.

    Attributes:
        verb: what was asked for.
        answer: the run's.
    """

    def __init__(self, verb: str, answer: Answer) -> None:
        super().__init__(verb, answer)  # as it was made: it may be sent to another process
        self.verb, self.answer = verb, answer

    def __str__(self) -> str:
        """For people."""
        return f"{self.verb}: {self.answer.outcome}{f', {self.answer.message}' if self.answer.message else ''}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way. Every process that sees the run's folder may wait for its answer.

    Attributes:
        folder: the run's ``requests/``.
        id: the request's.
        verb: what was asked for.
    """

    folder: Path
    id: str
    verb: str

    def answer(self) -> Answer | None:
        """The answer; None while there is none."""
        return read_answer(self.folder, self.id)

    def wait(self, timeout: float = 300.0) -> Answer:
        """The answer, waited for at most ``timeout`` seconds.

        Raises:
            NotDoneError: refused, aborted or failed, or there is no answer yet.
        """
        answer = wait_answer(self.folder, self.id, timeout)
        if answer is None:
            answer = Answer(outcome="failed", message=f"no answer within {timeout:g} s")
        if answer.outcome not in _DONE:
            raise NotDoneError(self.verb, answer)
        return answer
