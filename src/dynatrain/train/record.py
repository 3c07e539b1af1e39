"""What rank 0 writes of a switch: events as it goes on, a plan summary and a certificate at its end."""

import json
import logging
import platform
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import dynatrain
from dynatrain.cluster.board import Board
from dynatrain.cluster.summons import Summons
from dynatrain.execute.census import ALGORITHM
from dynatrain.judge.certificate import (
    Bytes,
    Cause,
    Certificate,
    Digest,
    Peak,
    PeakBytes,
    Replicas,
    Seconds,
    World,
)
from dynatrain.layout.layout import Layout
from dynatrain.layout.text import print_layout
from dynatrain.observe.atomic import write_atomically
from dynatrain.observe.log import Log
from dynatrain.observe.run import RunFolder
from dynatrain.plan.keepers import Keepers
from dynatrain.plan.loss import Restore
from dynatrain.plan.summary import PlanSummary, floor_seconds
from dynatrain.train.attempt import Attempt
from dynatrain.train.blueprint import Blueprint
from dynatrain.train.keeping import Note
from dynatrain.train.order import Order
from dynatrain.train.probe import Rates
from dynatrain.train.saver import Saved

_LOG = logging.getLogger(__name__)

SETTLED = 8
"""Steps in a layout after which ``lost_seconds`` is known: three that may be slow, and five for a median."""


_CERTIFICATE = "certificate.json"
_LOSS = "loss.json"


class Recorder:
    """Keeps the books of one run's switches. Every rank has one; rank 0's writes.

    A book that cannot be written (a full disk) is told on standard error; the run goes on without it.

    Args:
        folder: the run's.
        board: where ranks tell their lost seconds.
        rank: this rank.
        generation: of the world.
        attempt: number of the run's agent.
        rates: measured link and copy rates, for the floor; None where nothing was measured.
        global_sequences: samples of a step.
    """

    def __init__(
        self,
        folder: RunFolder,
        board: Board,
        *,
        rank: int,
        generation: int,
        attempt: int,
        rates: Rates | None,
        global_sequences: int = 0,
    ) -> None:
        self._folder = folder
        self._board = board
        self._rank = rank
        self._generation, self._attempt = generation, attempt
        self._rates = rates
        self._global_sequences = global_sequences
        self._log = Log(folder.events, generation=generation, attempt=attempt)
        self._ends: list[float] = []
        self._apart = 0.0
        self._before: float | None = None
        self._counting = ""
        self._open: tuple[str, Certificate, int] | None = None

    def enter(self, board: Board, rank: int, generation: int) -> None:
        """Keep the books of another world; the lost seconds of the last switch stay unknown if they were."""
        if self._open is not None and not self._counting:
            self._board.leave(self._open[0])
        self._counting, self._open = "", None
        self._board, self._rank, self._generation = board, rank, generation
        self._log.enter(generation)

    def announced(self, order: Order, step: int) -> None:
        """A switch or a stop was agreed on."""
        self._event(order, "announce", step=step, to=order.layout, verb=order.verb, by=order.by)

    def refused(self, order: Order, step: int, reason: str) -> None:
        """What was scheduled, or asked for by the loop, is not possible any more."""
        self._event(order, "refused", step=step, to=order.layout, verb=order.verb, by=order.by, reason=reason)

    def step_ended(self, now: float) -> None:
        """A step ended at ``now`` (seconds, monotonic): count towards the lost seconds of the last switch."""
        if not self._counting:
            self._ends.clear()  # but for the lost seconds, the last one is all that a switch asks for
        self._ends.append(now - self._apart)
        if self._counting and len(self._ends) == SETTLED:
            self._board.vote(self._counting, self._rank, self._lost())
            if self._rank != 0:
                self._board.leave(self._counting)
            self._counting = ""
        if self._open is not None:
            self._complete()

    def apart(self, seconds: float) -> None:
        """The step under way holds ``seconds`` of something that is no part of a step, as a validation: not counted."""
        self._apart += seconds

    def _lost(self) -> float:
        if self._before is None:
            return 0.0  # a newcomer had no step before
        steps = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        return self._ends[2] - self._before - 3 * statistics.median(steps[2:])

    def _complete(self) -> None:
        assert self._open is not None
        topic, certificate, number = self._open
        lost = self._board.votes(topic)
        if len(lost) == certificate.world.new:
            self._board.leave(topic)
            self._open = None
            complete = replace(certificate, lost_seconds=max(0.0, *lost.values()))
            self._write(number, _CERTIFICATE, complete.to_json())

    def loaded(self, step: int, checkpoint: str, layout: Layout) -> None:
        """The run goes on from a checkpoint."""
        if self._rank == 0:
            self._log.write("load", step=step, checkpoint=checkpoint, layout=print_layout(layout))

    def mended(self, number: int, loss: Summons, found: Restore, seconds: float) -> None:
        """A loss is survived: write down who was lost and at what, and where each byte of theirs has come from.

        Args:
            number: of the switch to what is left.
            loss: who was lost.
            found: what the run goes on from.
            seconds: from the news to the commit on this rank.
        """
        if self._rank != 0:
            return
        ranks = [{"rank": rank, "member": member} for rank, member in enumerate(loss.old) if member in loss.lost]
        told = found.told(self._global_sequences) | {"lost": ranks, "why": loss.why, "seconds": seconds}
        self._write(number, _LOSS, json.dumps(told, indent=1) + "\n")
        self._log.write("loss", switch=number, **told)

    def kept(self, note: Note, keepers: Keepers) -> None:
        """A snapshot is whole on this rank."""
        if self._rank == 0:
            told = {"step": note.step, "seconds": note.seconds, "own_bytes": keepers.own_bytes}
            self._log.write("snapshot", **told, sent_bytes=keepers.sent_bytes, keeper=keepers.keeper)

    def ready(self, layout: str, held: tuple[int, ...]) -> None:
        """A layout is prepared ahead; from now on nothing is, where it is empty."""
        if self._rank == 0:
            self._log.write("ready", layout=layout, held_bytes=held)

    def saved(self, saved: Saved) -> None:
        """A save has ended, well or not."""
        if self._rank == 0:
            self._log.write("save", step=saved.step, outcome=saved.outcome, message=saved.message)

    def ended(self, attempt: Attempt, outcome: str, reason: str, step: int, told: Mapping[int, Any]) -> None:
        """A switch was committed, aborted or failed: write its certificate."""
        if self._open is not None and not self._counting:
            self._board.leave(self._open[0])  # the others told their lost seconds and left
        self._counting, self._open = "", None
        committed, moved_on = outcome == "committed", attempt.order.switches
        if committed and moved_on:
            # The step under way is the first in the new layout; the last one before it ended before the stall.
            self._before, self._ends = self._ends[-1] if self._ends else None, []
            self._counting = f"s{attempt.order.number}/lost"
        if self._rank != 0:
            return
        number = attempt.order.number
        if attempt.blueprint is not None and attempt.blueprint.record is not None:
            self._write(number, "plan.json", attempt.blueprint.record.to_json())
        certificate = self._certificate(attempt, outcome, step, told, number)
        self._write(number, _CERTIFICATE, certificate.to_json())
        if committed and moved_on:
            self._open = (self._counting, certificate, number)
        elif committed:
            self._log.write("parking", step=step, switch=number, parked=attempt.order.verb == "park")
        self._event(attempt.order, outcome, step=step, reason=reason)

    def _write(self, number: int, name: str, text: str) -> None:
        folder = self._folder.switch(number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, text)
        except OSError as error:
            # The state is where it should be, only the books are not.
            _LOG.warning("%s of switch %d is not written: %s; the run goes on", name, number, error)

    def _event(self, order: Order, phase: str, **fields: Any) -> None:
        if self._rank == 0:
            self._log.write("switch", switch=order.number, phase=phase, **fields)

    def _certificate(
        self, attempt: Attempt, outcome: str, step: int, told: Mapping[int, Any], number: int
    ) -> Certificate:
        blueprint, report, order = attempt.blueprint, attempt.report, attempt.order
        summary = blueprint.summary if blueprint else None
        seconds = dict(attempt.seconds)
        for facts in told.values():
            for phase, value in facts["seconds"].items():
                seconds[phase] = max(value, seconds.get(phase, 0.0))
        world = World(old=attempt.old.layout.world_size, new=attempt.target.world_size)
        return Certificate(
            run_id=self._folder.name,
            switch=number,
            generation=self._generation,
            attempt=self._attempt,
            step=step - 1,
            from_=print_layout(attempt.old.layout),
            to=print_layout(attempt.target),
            world=world,
            cause=Cause(verb=order.verb, by=order.by, request_id=order.request_id),
            mode=blueprint.part.schedule.mode if blueprint else order.mode,
            outcome=outcome,
            plan_hash=f"{blueprint.plan_hash if blueprint else 0:016x}",
            coverage=dict(blueprint.coverage) if blueprint else {},
            replicas=Replicas(
                groups=report.groups if report else 0,
                checked=report.checked if report else 0,
                unequal=attempt.mended + (len(report.unequal) if report else 0),
                mended=attempt.mended,
            ),
            digest=Digest(
                algorithm=ALGORITHM,
                before=report.before if report else {},
                after=report.after if report else {},
                equal=bool(report and report.before == report.after),
            ),
            bytes=_bytes(summary),
            seconds=Seconds(**seconds),
            floor_seconds=_floor(summary, self._rates),
            peak_bytes=_peaks(blueprint, told, on_device=attempt.party.device.type != "cpu"),
            transport=attempt.carried_by,
            versions={
                "dynatrain": dynatrain.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        )


def _peaks(blueprint: Blueprint | None, told: Mapping[int, Any], *, on_device: bool) -> PeakBytes:
    """The most that each rank was to hold, and held, in the memories that the switch is about."""
    if blueprint is None:
        return PeakBytes(device={}, host={})
    here = {
        rank: Peak(
            predicted=pieces + (told[rank]["staging"] if rank in told else 0),
            measured=told[rank]["peak"] if rank in told else None,
        )
        for rank, pieces in enumerate(blueprint.peak)
    }
    there = {
        rank: Peak(predicted=pieces, measured=told[rank]["host"] if rank in told else None)
        for rank, pieces in enumerate(blueprint.host)
    }
    if on_device:
        return PeakBytes(device=here, host=there)
    both = {
        rank: Peak(
            predicted=peak.predicted + there[rank].predicted,
            measured=None if peak.measured is None else peak.measured + (there[rank].measured or 0),
        )
        for rank, peak in here.items()
        if rank in there
    }
    return PeakBytes(device={}, host=here | both)


def _bytes(summary: PlanSummary | None) -> Bytes:
    if summary is None:
        return Bytes(moved=0, relaid=0, adopted=0)
    return Bytes(moved=summary.moved, relaid=sum(summary.relaid), adopted=sum(summary.adopted))


def _floor(summary: PlanSummary | None, rates: Rates | None) -> float | None:
    if summary is None or rates is None:
        return None
    return floor_seconds(
        summary,
        link_bytes_per_second=rates.link_bytes_per_second,
        wire_bytes_per_second=rates.wire_bytes_per_second,
        copy_bytes_per_second=rates.copy_bytes_per_second,
    )
