"""What is foretold of a plan on a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass

from dynatrain.plan.table import FamilyPlan
from dynatrain.simulate.clock import Outcome, run
from dynatrain.simulate.floor import floor_parts
from dynatrain.simulate.links import Links
from dynatrain.simulate.machines import Machines
from dynatrain.simulate.traffic import Traffic
from dynatrain.space.tensor import Catalogue


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Seconds, and what they come from.

    Attributes:
        outcome: of the rounds.
        floor: seconds of each part of the floor, by what it is of.
    """

    outcome: Outcome
    floor: Mapping[str, float]

    @property
    def floor_seconds(self) -> float:
        """The largest part."""
        return max(self.floor.values())

    @property
    def ratio(self) -> float | None:
        """How many times the floor; None where nothing is written."""
        return self.outcome.seconds / self.floor_seconds if self.floor_seconds else None


def forecast(catalogue: Catalogue, plan: FamilyPlan, machines: Machines, ranks: int) -> Forecast:
    """Carry ``plan`` out on ``machines``, in numbers.

    Args:
        catalogue: the tensors.
        plan: made with the ``ranks_per_node`` of ``machines``.
        machines: the cluster.
        ranks: in either world.
    """
    rounds = Traffic(catalogue, plan)
    outcome = run(rounds, Links(machines, ranks), ranks, together=plan.schedule.mode == "tight")
    return Forecast(outcome=outcome, floor=floor_parts(catalogue, plan, machines, ranks))
