"""Asking a running run for something: one record, one answer."""

import math
import time
from collections.abc import Mapping
from typing import Any

from dynatrain.app.mistake import MistakeError
from dynatrain.app.output import emit, say
from dynatrain.observe.requests import Answer, Request, new_id, submit, wait_answer
from dynatrain.observe.run import RunFolder

CODES = {"done": 0, "unchanged": 0, "refused": 2, "aborted": 3, "failed": 3}
"""Exit code of each outcome. Aborted is 3: the run goes on, but what was asked for did not happen."""


_LOOK_SECONDS = 1.0
"""Between two looks whether somebody is there to answer."""
_FOLLOWED_SECONDS = 15.0
"""After the death of an agent that leads: by then another one has followed it, where there is another."""


def report(run: RunFolder, request: str, answer: Answer, *, json: bool) -> int:
    """Say what became of a request; gives the exit code."""
    if json:
        emit({"run": str(run.path), "id": request, "outcome": answer.outcome, "message": answer.message})
    else:
        say(f"{run.name}: {answer.outcome}{f', {answer.message}' if answer.message else ''}")
    return CODES[answer.outcome]


def ask(run: RunFolder, verb: str, arguments: Mapping[str, Any], timeout: float) -> tuple[str, Answer]:
    """Write a request and wait for its answer; gives the request's id and the answer.

    Args:
        run: whom.
        verb: what for.
        arguments: of the verb.
        timeout: seconds; after them the request is void, and a run that has not taken it never will.

    Raises:
        MistakeError: nobody is there to answer, or nobody did in time.
    """
    if not 0 < timeout < math.inf:
        raise MistakeError(f"--timeout is {timeout:g}; seconds, above 0.")
    if run.liveness() in {None, "ended", "gone"}:
        raise MistakeError(f"Run {run.name} is not running; see dynatrain status {run.name}.")
    request = Request(id=new_id(), verb=verb, arguments=dict(arguments), deadline=time.time() + timeout)
    try:
        submit(run.requests, request)
    except OSError as error:
        raise MistakeError(f"{run.requests} cannot be written: {error.strerror or error}.") from None
    return request.id, _awaited(run, request.id, timeout)


def _awaited(run: RunFolder, request_id: str, timeout: float) -> Answer:
    """The answer, or why there is none: an agent answers everything before it ends, but one may be killed."""
    end, last_seen = time.monotonic() + timeout, time.monotonic()
    while (now := time.monotonic()) < end:
        if answer := wait_answer(run.requests, request_id, min(_LOOK_SECONDS, end - now)):
            return answer
        state = run.liveness()
        if state == "ended" or (state == "gone" and now - last_seen > _FOLLOWED_SECONDS):
            left = wait_answer(run.requests, request_id, 0)
            what = "has ended" if state == "ended" else "is not running any more, its agent was killed"
            return left or Answer(outcome="failed", message=f"the run {what}; see dynatrain status {run.name}")
        last_seen = last_seen if state == "gone" else now
    return Answer(outcome="failed", message=f"no answer within {timeout:g} s; see dynatrain events {run.name}")
