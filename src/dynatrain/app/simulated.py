"""A change carried out on a described cluster in numbers: what ``simulate`` prints."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dynatrain.app.output import seconds, size
from dynatrain.app.plan_text import head
from dynatrain.app.planned import Change, timed
from dynatrain.judge.verdict import Verdict
from dynatrain.plan.schedule import predicted_peak
from dynatrain.simulate.forecast import Forecast, forecast
from dynatrain.simulate.machines import Machines


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """What was found.

    Attributes:
        forecast: seconds and bytes.
        verdict: of the judge, on the whole plan.
        peak: most bytes of pieces that a rank holds at one time.
        took: seconds of this machine for one rank's ``part``, the ``whole`` plan, its judgement (``judge``), and the
            forecast (``simulate``).
    """

    forecast: Forecast
    verdict: Verdict
    peak: int
    took: dict[str, float]


def simulate_change(change: Change, machines: Machines) -> Simulated:
    """Plan ``change`` for everybody, have it judged, and carry it out in numbers."""
    ranks = len(change.storage.old)
    whole, whole_took = timed(change.by_family)
    verdict, judge_took = timed(lambda: change.verdict_by_family(whole))
    found, took = timed(lambda: forecast(change.catalogue, whole, machines, ranks))
    busiest = int((found.outcome.received + found.outcome.sent).argmax())
    _, part_took = timed(lambda: change.part(busiest))
    return Simulated(
        forecast=found,
        verdict=verdict,
        peak=int(predicted_peak(change.storage, change.schedule).max()),
        took={"part": part_took, "whole": whole_took, "judge": judge_took, "simulate": took},
    )


def text(change: Change, model: str, cluster: str, found: Simulated) -> Iterator[str]:
    """For people."""
    outcome, floor = found.forecast.outcome, found.forecast.floor
    yield from head(change, model)
    yield (
        f"most of one rank: receives {size(int(outcome.received.max()))}, sends {size(int(outcome.sent.max()))}, "
        f"lays anew {size(int(outcome.relaid.max()))}, holds at most {size(found.peak)}"
    )
    rounds = f"{outcome.rounds} rounds, at most {outcome.messages:,} messages of one rank"
    yield f"all ranks: moved {size(int(outcome.received.sum()))}, in {rounds}"
    if outcome.link_seconds:
        yield f"busiest link: {outcome.link}, {size(outcome.link_bytes)} in {seconds(outcome.link_seconds)}"
    what = max(floor, key=floor.__getitem__)
    ratio = f", {found.forecast.ratio:.2f} times the floor" if found.forecast.ratio else ""
    yield f"on {cluster}: {seconds(outcome.seconds)}{ratio} ({seconds(found.forecast.floor_seconds)}: {what})"
    took = found.took
    judged = "sound" if found.verdict.ok else "NOT sound"
    yield (
        f"planned here: one rank's part in {seconds(took['part'])}, the whole in {seconds(took['whole'])}, "
        f"judged in {seconds(took['judge'])}: {judged}"
    )
    yield from (f"  - {problem}" for problem in found.verdict.problems)


def record(change: Change, machines: Machines, found: Simulated) -> dict[str, object]:
    """For programs."""
    outcome, (old, new) = found.forecast.outcome, change.layouts
    return {
        "from": old,
        "to": new,
        "mode": change.mode,
        "world": {"old": change.old.layout.world_size, "new": change.new.layout.world_size},
        "machines": asdict(machines),
        "bytes": {
            "moved": int(outcome.received.sum()),
            "relaid": int(outcome.relaid.sum()),
            "most_received": int(outcome.received.max()),
            "most_sent": int(outcome.sent.max()),
            "most_relaid": int(outcome.relaid.max()),
        },
        "link": {"name": outcome.link, "bytes": outcome.link_bytes, "seconds": outcome.link_seconds},
        "rounds": outcome.rounds,
        "messages": outcome.messages,
        "predicted_seconds": outcome.seconds,
        "floor_seconds": found.forecast.floor_seconds,
        "floor": dict(found.forecast.floor),
        "ratio": found.forecast.ratio,
        "peak_bytes": found.peak,
        "seconds": found.took,
        "verdict": {"ok": found.verdict.ok, "problems": found.verdict.problems},
    }
