"""The one error of a configuration: everything that is wrong with it, at once."""


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        problems: every mistake, one entry each: the key, the value, where it came from, the rule.
    """

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join((what, *("  - " + problem.replace("\n", "\n    ") for problem in problems))))
