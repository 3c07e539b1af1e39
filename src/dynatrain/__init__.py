"""dynatrain: train language models whose parallel layout changes while training runs."""

__version__ = "0.1.0"
