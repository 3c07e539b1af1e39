"""Documents, as text or tokens, to numbered samples; the order is a function of (seed, step) alone. No torch."""
