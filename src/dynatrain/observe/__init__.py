"""Run folders, events and metrics: what happened, written so that people and programs can read it. A leaf; no torch."""
