"""Carries requests from the run folder to the board, and answers back."""

import json
from collections import deque

from dynatrain.cluster.board import Board
from dynatrain.observe.log import Log
from dynatrain.observe.requests import CROSSINGS, Answer, Inbox, Request


class Desk:
    """The first node's requests.

    What asks for other members is kept for whoever leads the agents; all else is published as it is.

    Args:
        inbox: of the run folder.
        board: where ranks read requests and post answers.
        log: of events.
    """

    def __init__(self, inbox: Inbox, board: Board, log: Log) -> None:
        self._inbox = inbox
        self._board = board
        self._log = log
        self._open: dict[int, Request] = {}
        self._scales: deque[Request] = deque()
        self._asked: dict[int, Answer | None] = {}

    def serve(self) -> None:
        """Publish what is new, and write the answers that have come."""
        for request in self._inbox.new():
            self.note(request)
            if request.verb in CROSSINGS:
                self._scales.append(request)
            else:
                self.publish(request)
        for number, request in tuple(self._open.items()):
            text = self._board.take_answer(number)
            if text is None:
                continue
            del self._open[number]
            answer = Answer.from_json(text)
            if number in self._asked:
                self._asked[number] = answer
            else:
                self.answer(request, answer)

    def stop(self, request: Request) -> None:
        """Put up a request of the agent's own."""
        self.note(request)
        self.publish(request)

    def scale(self, request: Request) -> None:
        """Put a request of the agent's own behind those for other members."""
        self.note(request)
        self._scales.append(request)

    def publish(self, request: Request) -> None:
        """Put a request up for the ranks as it is."""
        self._open[self._board.publish(request.to_json())] = request

    def next_scale(self) -> Request | None:
        """Take the oldest request for other members; None where there is none."""
        return self._scales.popleft() if self._scales else None

    def ask(self, request: Request, arguments: dict[str, object]) -> int:
        """Put a request for other members up, with what was made of it; gives the number under which it is."""
        promised = {"at": request.arguments["at"]} if "at" in request.arguments else {}
        number = self._board.publish(json.dumps({**json.loads(request.to_json()), "arguments": arguments | promised}))
        self._open[number] = request
        self._asked[number] = None
        return number

    def heard(self, number: int) -> Answer | None:
        """The ranks' answer to what was asked; None while there is none."""
        return self._asked[number]

    def answer(self, request: Request, answer: Answer) -> None:
        """Tell whoever asked."""
        self._inbox.answer(request.id, answer)
        self._log.write("answer", id=request.id, outcome=answer.outcome, message=answer.message, switch=answer.switch)

    def note(self, request: Request) -> None:
        """Write down that a request was taken."""
        self._log.write("request", id=request.id, verb=request.verb, arguments=dict(request.arguments), by=request.by)
