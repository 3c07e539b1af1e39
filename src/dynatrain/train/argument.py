"""What a loop can get wrong in a call."""


class ArgumentError(ValueError):
    """An argument, or what ``build`` made, that cannot be; the text says what was seen, the rule, and what would do."""
