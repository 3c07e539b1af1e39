"""Ranks that come and go as they are told and train nothing: the protocol of a crossing, by hand.

Faults are planted by the environment's ``FAULTS``, ``{member: fault}`` in JSON; see :data:`FAULTS`.
"""

import json
import os
import signal
import sys
import time

from dynatrain.cluster.context import RankContext
from dynatrain.cluster.seat import Seat, take_seat
from dynatrain.cluster.worlds import crossing_board
from dynatrain.observe.requests import Answer

FAULTS = (
    "dies",  # before it sits down
    "silent",  # never sits down
    "halts",  # stops itself when it has sat down and was told to join
    "clings",  # stops itself when it has left
    "objects",  # says, as rank 0, that the crossing was aborted
    "breaks",  # raises when it has left
    "slow",  # takes two seconds before it sits down
)
PER_STEP = 0.01


def cross(context: RankContext) -> int:
    """To the end of a step that somebody asks for, or out of the world."""
    fault = json.loads(os.environ.get("FAULTS", "{}")).get(str(context.member), "")
    if fault == "dies":
        raise ImportError("planted: no module named moe")
    if fault == "silent":
        time.sleep(600)
    if fault == "slow":
        time.sleep(2.0)
    with take_seat(context) as seat:
        return _Crosser(seat, fault).run()


class _Crosser:
    def __init__(self, seat: Seat, fault: str) -> None:
        self._seat = seat
        self._fault = fault
        self._member = seat.context.member
        self._world = tuple(range(seat.context.world_size))
        self._layout = f"dp{len(self._world)}"
        self._seen = seat.board.news()

    def run(self) -> int:
        if self._seat.context.joins and not self._join():
            return 0
        step = 0
        while True:
            step += 1
            self._seat.heart.at(step=step, phase="train", layout=self._layout)
            time.sleep(PER_STEP)
            while self._seen < self._seat.board.news():
                number, self._seen = self._seen, self._seen + 1
                text = self._seat.board.read(number)
                asked = json.loads(text) if text else {"verb": "none"}
                if asked["verb"] == "stop":
                    self._answer(number, "done")
                    return 75 if "GRACE" in os.environ else 0
                if asked["verb"] == "scale" and self._cross(number, asked["arguments"]):
                    self._say(left=self._world)
                    return self._leave()

    def _join(self) -> bool:
        """A newcomer's part: whether it was admitted."""
        while (text := self._seat.board.peek("toy/order")) is None or json.loads(text)[
            "generation"
        ] != self._generation:
            if self._go(self._generation, 99) is not None:
                return False
            time.sleep(PER_STEP)
        order = json.loads(text)
        if self._fault == "halts":
            os.kill(os.getpid(), signal.SIGSTOP)
        board = crossing_board(self._seat.worlds.run, self._generation, order["holders"])
        board.ready(self._generation, self._member, 0)
        while (go := board.go_edge(self._generation)) is None:
            time.sleep(PER_STEP)
        if go.edge >= 0:
            self._enter(order["arguments"])
            self._seen = order["number"] + 1
        return go.edge >= 0

    @property
    def _generation(self) -> int:
        return self._seat.context.generation

    def _go(self, generation: int, holders: int):
        return crossing_board(self._seat.worlds.run, generation, holders).go_edge(generation)

    def _cross(self, number: int, arguments: dict) -> bool:
        """An old rank's part: whether it leaves."""
        generation, new = arguments["generation"], arguments["members"]
        holders = len({*self._world, *new})
        if self._world[0] == self._member:
            order = {"generation": generation, "holders": holders, "arguments": arguments, "number": number}
            self._seat.board.post("toy/order", json.dumps(order))
        board = crossing_board(self._seat.worlds.run, generation, holders)
        if self._fault == "objects":
            board.give_up(generation, "planted: no memory")
        board.ready(generation, self._member, 0)
        while (go := board.go_edge(generation)) is None:
            time.sleep(PER_STEP)
        if go.edge < 0:
            self._answer(number, "aborted", go.reason)
            return False
        self._answer(number, "done", arguments["layout"])
        self._enter(arguments)
        return self._member not in new

    def _enter(self, arguments: dict) -> None:
        self._world, self._layout = tuple(arguments["members"]), arguments["layout"]
        self._say(world=self._world, layout=self._layout, generation=arguments["generation"])

    def _leave(self) -> int:
        if self._fault == "clings":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._fault == "breaks":
            raise RuntimeError("planted: after all was over")
        return 0

    def _answer(self, number: int, outcome: str, message: str = "") -> None:
        if self._world[0] == self._member:
            self._seat.board.answer(number, Answer(outcome=outcome, message=message).to_json())

    def _say(self, **facts: object) -> None:
        sys.stdout.write(json.dumps({"member": self._member, **facts}) + "\n")
