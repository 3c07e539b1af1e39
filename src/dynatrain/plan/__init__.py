"""From ownership A to ownership B: rounds of moves, bytes, peak memory, floor. No torch."""
