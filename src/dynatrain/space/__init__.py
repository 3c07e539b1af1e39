"""What exists, named once, and which boxes each rank owns under a layout. No torch."""
