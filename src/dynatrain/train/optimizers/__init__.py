"""Optimizers over sharded parameters, and the schemas of what they and torch's keep."""
