"""Carries requests from the run folder to the board, and answers back."""

from dynatrain.cluster.board import Board
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer, Inbox, Request


class Desk:
    """The first node's requests.

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

    def serve(self) -> None:
        """Publish what is new, and write the answers that have come."""
        for request in self._inbox.new():
            self.publish(request)
        for number, request in tuple(self._open.items()):
            text = self._board.take_answer(number)
            if text is not None:
                del self._open[number]
                self._answer(request, Answer.from_json(text))

    def publish(self, request: Request) -> None:
        """Put a request up for the ranks."""
        self._log.write("request", id=request.id, verb=request.verb, arguments=dict(request.arguments), by=request.by)
        self._open[self._board.publish(request.to_json())] = request

    def _answer(self, request: Request, answer: Answer) -> None:
        self._inbox.answer(request.id, answer)
        self._log.write("answer", id=request.id, outcome=answer.outcome, message=answer.message, switch=answer.switch)
