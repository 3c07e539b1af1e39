"""Documents to numbered samples; the order is a function of (seed, step) alone. No torch."""
