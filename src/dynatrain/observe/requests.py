"""What people ask of a run: one record in the run folder, answered by another.

``requests/ID.json`` is written once, whole, by whoever asks (a command, a signal, a schedule); the agent takes it and,
when its outcome is known, writes ``requests/ID.answer.json`` beside it. Both are atomic, so neither side can read half.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from dynatrain.observe.atomic import create_atomically, write_atomically
from dynatrain.observe.modes import MODES, mode_problem

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "switch": {"layout": "a text", "mode": "a text"},
    "scale": {"size": "a number from 1", "layout": "a text", "leave": "a list of ranks", "mode": "a text"},
    "save": {},
    "stop": {},
}
"""The verbs; the arguments that each knows, and what they are."""

NEEDED: Mapping[str, tuple[frozenset[str], ...]] = {
    "switch": (frozenset({"layout"}),),
    "scale": (frozenset({"size", "layout", "leave"}),),
}
"""The arguments that a verb cannot do without: one of each set."""

Outcome = Literal["done", "unchanged", "refused", "aborted", "failed"]


class RequestError(ValueError):
    """A request that no run could take; the text lists everything that is wrong with it."""


def new_id() -> str:
    """An id that no other request of this run has, in the order of time."""
    return f"{time.time_ns()}-{os.getpid()}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_IS: Mapping[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number from 1": lambda value: _is_number(value) and value >= 1,
    "a list of ranks": lambda value: isinstance(value, list) and all(_is_number(one) and one >= 0 for one in value),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One wish.

    Attributes:
        id: names the request for good; the same id again is the same request.
        verb: what to do: a key of :data:`ARGUMENTS`.
        arguments: of the verb, for example ``{"layout": "fsdp4"}``. Of ``scale``: ``size``, how many ranks there are to
            be; ``layout``, in which; ``leave``, which ranks leave, by their present numbers.
        by: who asks: ``cli``, ``schedule``, ``SIGINT``.
        deadline: seconds since 1970 after which it is no longer wanted; None for never.
    """

    id: str
    verb: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    by: str = "cli"
    deadline: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no run could take.

        Raises:
            RequestError: with every problem.
        """
        problems = []
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", self.id) or self.id.endswith(".answer"):
            problems.append(f"id {self.id!r}: at most 100 of [A-Za-z0-9._-], for example {new_id()}")
        if self.verb not in ARGUMENTS:
            problems.append(f"verb {self.verb!r}: one of {', '.join(sorted(ARGUMENTS))}")
        else:
            problems += self._argument_problems()
        mode = self.arguments.get("mode", MODES[0])
        if isinstance(mode, str) and (problem := mode_problem(mode)):
            problems.append(problem)
        if problems:
            raise RequestError("Bad request: " + "; ".join(problems) + ".")

    def _argument_problems(self) -> Iterator[str]:
        known, given = ARGUMENTS[self.verb], set(self.arguments)
        for one_of in NEEDED.get(self.verb, ()):
            if not one_of & given:
                yield f"{self.verb} needs {' or '.join(map(repr, sorted(one_of)))}"
        for name in sorted(given - known.keys()):
            yield f"{self.verb} knows no {name!r}; it takes {', '.join(sorted(known)) or 'nothing'}"
        for name in sorted(given & known.keys()):
            if not _IS[known[name]](self.arguments[name]):
                yield f"{name}: {self.arguments[name]!r} is not {known[name]}"

    def to_json(self) -> str:
        """The record as text; :meth:`from_json` reads it."""
        return json.dumps({**asdict(self), "arguments": dict(self.arguments)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record.

        Raises:
            RequestError: it is no record of a request.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise RequestError(f"Bad request: not JSON ({error}).") from error
        if not isinstance(found, dict) or not isinstance(found.get("arguments", {}), dict):
            raise RequestError("Bad request: not an object with id, verb, arguments, by, deadline.")
        texts = all(isinstance(found.get(name, ""), str) for name in ("id", "verb", "by"))
        if not texts or not isinstance(found.get("deadline"), float | int | None):
            raise RequestError("Bad request: id, verb and by are texts, deadline is a number or null.")
        try:
            return cls(**found)
        except TypeError as error:
            raise RequestError(f"Bad request: a record has id, verb, arguments, by, deadline ({error}).") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        outcome: ``done``; ``unchanged`` (it was already so); ``refused`` (not possible, nothing was tried); ``aborted``
            (tried and taken back, the run goes on as before); ``failed`` (the run has ended without it).
        message: for people.
        switch: number of the switch that came of it; None where none did.
    """

    outcome: Outcome
    message: str = ""
    switch: int | None = None

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        found: dict[str, Any] = json.loads(text)
        return cls(**found)


def submit(folder: Path, request: Request) -> None:
    """Ask: write the record. Asking the very same again changes nothing and leads to the same answer.

    Args:
        folder: the run's ``requests/``.
        request: the wish.

    Raises:
        RequestError: another request has this id.
        OSError: the folder cannot be written.
    """
    path = folder / f"{request.id}.json"
    try:
        create_atomically(path, request.to_json())
    except FileExistsError:
        if path.read_text(encoding="utf-8") != request.to_json():
            raise RequestError(f"Request {request.id} exists and asks for something else; take a new id.") from None


def read_answer(folder: Path, request_id: str) -> Answer | None:
    """The answer to a request; None while there is none."""
    try:
        return Answer.from_json((folder / f"{request_id}.answer.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def wait_answer(folder: Path, request_id: str, timeout: float) -> Answer | None:
    """The answer to a request, waited for at most ``timeout`` seconds; None where it did not come in time."""
    end = time.monotonic() + timeout
    while (answer := read_answer(folder, request_id)) is None and time.monotonic() < end:
        time.sleep(0.05)
    return answer


class Inbox:
    """The agent's side of a run's ``requests/``: every request is taken once and answered once.

    Args:
        folder: the run's ``requests/``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: set[str] = set()

    def new(self) -> list[Request]:
        """The requests not taken before, in the order in which they were written.

        What cannot be read, or is past its deadline, is answered ``refused`` here and not returned.
        """
        fresh = []
        for request_id in self._unanswered():
            if request_id in self._taken:
                continue
            self._taken.add(request_id)
            problem, request = self._read(request_id)
            if request is None:
                self.answer(request_id, Answer(outcome="refused", message=problem))
            else:
                fresh.append(request)
        return fresh

    def answer(self, request_id: str, answer: Answer) -> None:
        """Write the answer to a request."""
        write_atomically(self._folder / f"{request_id}.answer.json", answer.to_json())

    def close(self, message: str) -> None:
        """Answer everything that is still open with ``failed``: nobody is left to do it."""
        for request_id in self._unanswered():
            self.answer(request_id, Answer(outcome="failed", message=message))

    def _unanswered(self) -> list[str]:
        """Ids without an answer, oldest file first."""
        names = {entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json")}
        asked = {n.removesuffix(".json") for n in names if not n.endswith(".answer.json") and not n.startswith(".")}
        still_open = [request_id for request_id in asked if f"{request_id}.answer.json" not in names]
        return sorted(still_open, key=lambda request_id: (self._written(request_id), request_id))

    def _written(self, request_id: str) -> int:
        """When a request was written, in nanoseconds; 0 where somebody has just taken the file away."""
        try:
            return (self._folder / f"{request_id}.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _read(self, request_id: str) -> tuple[str, Request | None]:
        """``(what is wrong, None)`` or ``("", the request)``."""
        try:
            request = Request.from_json((self._folder / f"{request_id}.json").read_text(encoding="utf-8"))
        except (RequestError, OSError, UnicodeDecodeError) as error:
            return str(error), None
        if request.id != request_id:
            return f"Bad request: the file is named {request_id}, the record {request.id}.", None
        if request.deadline is not None and request.deadline < time.time():
            return "Too late: the request's deadline had passed before it could be taken.", None
        return "", request
