"""What people ask of a run: one record in the run folder, answered by another.

``requests/ID.json`` is written once, whole, by whoever asks (a command, a signal, a schedule); the agent takes it and,
when its outcome is known, writes ``requests/ID.answer.json`` beside it. Both are atomic, so neither side can read half.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from dynatrain.observe.atomic import create_atomically, write_atomically
from dynatrain.observe.fields import Rule, count, one_of, problems_of
from dynatrain.observe.modes import MODES, mode_problem
from dynatrain.observe.objects import ObjectError, parse_object

_LOG = logging.getLogger(__name__)

_LONGEST_ID = 100

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "switch": {"layout": "a text", "mode": "a text"},
    "prepare": {"layout": "a text", "mode": "a text"},
    "scale": {
        "size": "a number from 1",
        "layout": "a text",
        "leave": "a list of ranks",
        "nodes": "a list of nodes",
        "mode": "a text",
    },
    "lend": {
        "size": "a number from 1",
        "layout": "a text",
        "leave": "a list of ranks",
        "mode": "a text",
        "at": "a number from 1",
    },
    "reclaim": {"layout": "a text", "mode": "a text", "at": "a number from 1"},
    "park": {},
    "unpark": {},
    "save": {},
    "stop": {},
}
"""The verbs; the arguments that each knows, and what they are."""

CROSSINGS = ("scale", "lend", "reclaim")
"""The verbs that lead to a world of other members."""

NEEDED: Mapping[str, tuple[frozenset[str], ...]] = {
    "switch": (frozenset({"layout"}),),
    "prepare": (frozenset({"layout"}),),
    "scale": (frozenset({"size", "layout", "leave", "nodes"}),),
    "lend": (frozenset({"size", "leave"}),),
}
"""The arguments that a verb cannot do without: one of each set."""

Outcome = Literal["done", "unchanged", "refused", "aborted", "failed"]


_ANSWER: Rule = {
    "outcome": one_of(*get_args(Outcome)),
    "message": lambda value: isinstance(value, str),
    "switch": lambda value: value is None or count(value),
}


class RequestError(ValueError):
    """A request that no run could take, or no answer to one; the text lists everything that is wrong with it."""


def new_id() -> str:
    """An id that no other request of this run has, in the order of time."""
    return f"{time.time_ns()}-{os.getpid()}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(one) and one >= 0 for one in value)


_IS: Mapping[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number from 1": lambda value: _is_number(value) and value >= 1,
    "a list of ranks": _are_numbers,
    "a list of nodes": _are_numbers,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One wish.

    Attributes:
        id: names the request for good; the same id again is the same request.
        verb: what to do: a key of :data:`ARGUMENTS`.
        arguments: of the verb, for example ``{"layout": "fsdp4"}``. Of ``scale``: ``size``, how many ranks there are to
            be; ``layout``, in which; ``leave``, which ranks leave, by their present numbers; ``nodes``, which hosts
            leave, with their ranks and their agent. Of ``lend`` and ``reclaim`` also ``at``: first step in that world.
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
        well_formed = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.id) and len(self.id) <= _LONGEST_ID
        if not well_formed or self.id.endswith(".answer"):
            problems.append(f"id {self.id!r}: at most {_LONGEST_ID} of [A-Za-z0-9._-], for example {new_id()}")
        if self.verb not in ARGUMENTS:
            problems.append(f"verb {self.verb!r}: one of {', '.join(sorted(ARGUMENTS))}")
        else:
            problems += self._argument_problems()
        if self.deadline is not None and not math.isfinite(self.deadline):
            problems.append(f"deadline {self.deadline}: seconds since 1970, or None for never")
        mode = self.arguments.get("mode", MODES[0])
        if isinstance(mode, str) and (problem := mode_problem(mode)):
            problems.append(problem)
        if problems:
            raise RequestError("Bad request: " + "; ".join(problems) + ".")

    def _argument_problems(self) -> Iterator[str]:
        known, given = ARGUMENTS[self.verb], set(self.arguments)
        for names in NEEDED.get(self.verb, ()):
            if not names & given:
                yield f"{self.verb} needs {' or '.join(map(repr, sorted(names)))}"
        for name in sorted(given - known.keys()):
            yield f"{self.verb} knows no {name!r}; it takes {', '.join(sorted(known)) or 'nothing'}"
        for name in sorted(given & known.keys()):
            if not _IS[known[name]](self.arguments[name]):
                yield f"{name}: {self.arguments[name]!r} is not {known[name]}"

    def to_json(self) -> str:
        """The record as text; :meth:`from_json` reads it."""
        return json.dumps({**asdict(self), "arguments": dict(self.arguments)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a record.

        Raises:
            RequestError: it is no record of a request.
        """
        try:
            found = parse_object(text)
        except ObjectError as error:
            raise RequestError(f"Bad request: the record {error}.") from None
        if not isinstance(found.get("arguments", {}), dict):
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
    def from_json(cls, text: str | bytes) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            RequestError: it is no answer.
        """
        try:
            found = parse_object(text)
        except ObjectError as error:
            raise RequestError(f"Bad answer: the record {error}.") from None
        if problems := problems_of("answer", found, _ANSWER):
            raise RequestError(f"Bad answer: {'; '.join(problems)}.")
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
    """The answer to a request; None while there is none.

    Raises:
        RequestError: it was damaged.
    """
    try:
        return Answer.from_json((folder / f"{request_id}.answer.json").read_bytes())
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
        self._unsaid: dict[str, Answer] = {}
        self._warned: set[str] = set()

    def new(self) -> list[Request]:
        """The requests not taken before, in the order in which they were written.

        What cannot be read, or is past its deadline, is answered ``refused`` here and not returned. Answers that the
        disk did not take are written now, where it takes them.
        """
        for request_id, answer in tuple(self._unsaid.items()):
            self.answer(request_id, answer)
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
        """Write the answer to a request; where the disk does not take it, that is told, and tried again."""
        try:
            write_atomically(self._folder / f"{request_id}.answer.json", answer.to_json())
        except OSError as error:
            if request_id not in self._unsaid:
                _LOG.warning("the answer to request %s is not written: %s; the run goes on", request_id, error)
            self._unsaid[request_id] = answer
        else:
            self._unsaid.pop(request_id, None)

    def close(self, message: str) -> None:
        """Answer everything that is still open with ``failed``: nobody is left to do it."""
        for request_id in self._unanswered():
            self.answer(request_id, self._unsaid.get(request_id, Answer(outcome="failed", message=message)))

    def turn_down(self, arguments: Collection[str], message: str) -> None:
        """Answer what is still open and has one of these arguments with ``refused``."""
        for request_id in self._unanswered():
            _, request = self._read(request_id)
            if request is not None and not request.arguments.keys().isdisjoint(arguments):
                self.answer(request_id, Answer(outcome="refused", message=message))

    def _unanswered(self) -> list[str]:
        """Ids without an answer, oldest file first; none while the folder cannot be read."""
        try:
            names = {entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json")}
        except OSError as error:
            self._warn_once(f"requests are not read: {error}")
            return []
        asked = {n.removesuffix(".json") for n in names if not n.endswith(".answer.json") and not n.startswith(".")}
        still_open = [one for one in asked if f"{one}.answer.json" not in names and self._may_be_one(one)]
        return sorted(still_open, key=lambda request_id: (self._written(request_id), request_id))

    def _may_be_one(self, request_id: str) -> bool:
        """Whether something could be answered at all: the disk knows no name of any length."""
        if len(os.fsencode(request_id)) <= _LONGEST_ID:
            return True
        self._warn_once(f"{request_id}.json is no request: an id has at most {_LONGEST_ID} letters")
        return False

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning("%s; the run goes on", text)

    def _written(self, request_id: str) -> int:
        """When a request was written, in nanoseconds; 0 where that cannot be seen, or the file was just taken away."""
        try:
            return (self._folder / f"{request_id}.json").stat().st_mtime_ns
        except OSError:
            return 0

    def _read(self, request_id: str) -> tuple[str, Request | None]:
        """``(what is wrong, None)`` or ``("", the request)``."""
        try:
            request = Request.from_json((self._folder / f"{request_id}.json").read_bytes())
        except (RequestError, OSError) as error:
            return str(error), None
        if request.id != request_id:
            return f"Bad request: the file is named {request_id}, the record {request.id}.", None
        if request.deadline is not None and request.deadline < time.time():
            return "Too late: the request's deadline had passed before it could be taken.", None
        return "", request
