"""A rank for tests of the command line: it sleeps for steps, and answers switches with certificates, moving nothing."""

import time
from dataclasses import replace

from dynatrain.app.planned import change_of_model
from dynatrain.app.runs import config_of
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.seat import Seat, take_seat
from dynatrain.judge.certificate import (
    Bytes,
    Cause,
    Certificate,
    Coverage,
    Digest,
    Peak,
    PeakBytes,
    Replicas,
    Seconds,
    World,
)
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.observe.atomic import write_atomically
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer, Request
from dynatrain.observe.versions import versions
from dynatrain.space.run_check import check_run

PER_STEP = 0.02


def certificate(
    run_id: str, number: int, step: int, record, *, by: str = "schedule", request_id: str = ""
) -> Certificate:
    """A certificate that holds together, for a plan."""
    written = sum(record.bytes.values())
    digest = {"param": "0123456789abcdef"}
    return Certificate(
        run_id=run_id,
        switch=number,
        generation=0,
        step=step,
        from_=record.from_,
        to=record.to,
        world=World(old=len(record.peak_bytes), new=len(record.peak_bytes)),
        cause=Cause(verb="switch", by=by, request_id=request_id),
        mode=record.mode,
        outcome="committed",
        plan_hash=record.plan_hash,
        coverage={"param": Coverage(expected=written, written=written)},
        replicas=Replicas(groups=1, checked=2, unequal=0),
        digest=Digest(algorithm="test", before=digest, after=digest, equal=True),
        bytes=Bytes(**record.bytes),
        seconds=Seconds(
            build=0.1, warm=0.01, quiesce=0.001, move=0.02, check=0.1, compile=0.0, commit=0.001, stall=0.03
        ),
        lost_seconds=0.05,
        floor_seconds=0.01,
        peak_bytes=PeakBytes(
            device={}, host={rank: Peak(predicted=peak, measured=peak) for rank, peak in enumerate(record.peak_bytes)}
        ),
        transport="gloo",
        versions=versions(),
    )


class Toy:
    """Rank 0's part: writes what a training loop writes."""

    def __init__(self, seat: Seat) -> None:
        self.run = seat.context.folder
        self.checked = check_run(config_of(self.run))
        self.layout = self.checked.layout
        self.number = 0
        self.metrics = Log(self.run.metrics, generation=0, attempt=seat.context.attempt)
        self.events = Log(self.run.events, generation=0, attempt=seat.context.attempt)

    def step(self, step: int) -> None:
        """One line."""
        self.metrics.write(
            "step",
            step=step,
            loss=8.3 - step * 0.01,
            grad_norm=1.0,
            lr=1e-3,
            tokens=1024,
            tokens_per_second=1024 / PER_STEP,
            seconds=PER_STEP,
            layout=print_layout(self.layout),
        )

    def switch(self, step: int, layout, by: str, request_id: str = "") -> Answer:
        """Plan for real, move nothing, certify."""
        if layout == self.layout:
            return Answer(outcome="unchanged", message="it is in that layout")
        self.number += 1
        planned = change_of_model(self.checked.shape, (self.layout, layout), mode="keep")
        whole = planned.whole()
        record = planned.record(whole, planned.summary(whole))
        folder = self.run.switch(self.number)
        folder.mkdir()
        write_atomically(folder / "plan.json", record.to_json())
        made = certificate(self.run.name, self.number, step - 1, record, by=by, request_id=request_id)
        if by == "cli" and self.checked.config.seed == 13:
            made = replace(made, outcome="aborted")
        write_atomically(folder / "certificate.json", made.to_json())
        self.events.write("switch", switch=self.number, phase=made.outcome, step=step, reason="planted")
        if made.outcome == "aborted":
            return Answer(outcome="aborted", message="planted", switch=self.number)
        self.layout = layout
        return Answer(outcome="done", switch=self.number)


def train(context: RankContext) -> None:
    """To the end of the configured steps, or until asked to stop."""
    with take_seat(context) as seat:
        checked = check_run(config_of(context.folder))
        scheduled = dict(checked.switches)
        toy = Toy(seat) if context.rank == 0 else None
        seen = 0
        for step in range(checked.config.steps):
            seat.heart.at(step=step, phase="train")
            while seen < seat.board.news():
                request = Request.from_json(seat.board.read(seen) or "{}")
                number, seen = seen, seen + 1
                if request.verb == "stop":
                    if toy:
                        seat.board.answer(number, Answer(outcome="done").to_json())
                    return
                if toy:
                    answer = toy.switch(step, parse_layout(request.arguments["layout"]), request.by, request.id)
                    seat.board.answer(number, answer.to_json())
            if toy:
                if step in scheduled:
                    toy.switch(step, scheduled[step], "schedule")
                toy.step(step)
            time.sleep(PER_STEP)
        seat.heart.at(step=step, phase="end")


def broken(_: RankContext) -> None:
    """Ends badly at once."""
    raise RuntimeError("planted")
