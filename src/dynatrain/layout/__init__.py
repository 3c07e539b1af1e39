"""Who does what: axes, rank order, legality, text, and the difference of two layouts. No torch."""
