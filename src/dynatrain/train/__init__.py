"""The loop, the optimizer, the layout applied to a model, and the Switcher that changes it while training runs."""
