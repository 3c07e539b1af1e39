"""What the planner refuses."""


class PlanError(ValueError):
    """A switch that cannot be planned. The text has what was seen, the rule, and the nearest legal choice."""
