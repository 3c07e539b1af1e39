"""What the user asked for: frozen values, their TOML spelling, and where each value came from. No torch."""
