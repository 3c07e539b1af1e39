"""What people get wrong, gathered so that they see all of it at once."""

from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


class MistakeError(ValueError):
    """Something in the command that cannot work; the text says what was seen, the rule, and what would do."""


def is_mistake(error: BaseException) -> bool:
    """Whether an error is the user's. Every ``ValueError`` class of ours is; a bare ``ValueError`` is a bug of ours."""
    return isinstance(error, ValueError) and type(error).__module__.startswith("dynatrain.")


def all_of(*attempts: Callable[[], Any]) -> tuple[Any, ...]:
    """The results of all ``attempts``.

    Raises:
        MistakeError: with the texts of all that failed by a mistake, each once.
    """
    results, texts = [], dict[str, None]()
    for attempt in attempts:
        try:
            results.append(attempt())
        except ValueError as error:
            if not is_mistake(error):
                raise
            texts[str(error)] = None
    if texts:
        raise MistakeError("\n".join(texts))
    return tuple(results)
