"""The independent judge of plans and certificates: shares the plan's format with its builder and nothing else."""
