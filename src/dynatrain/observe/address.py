"""Where a running run takes in agents from other machines: ``join.json`` in its folder, for its owner's eyes alone."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from dynatrain.observe.fields import Rule, count, problems_of, text
from dynatrain.observe.objects import ObjectError, read_object

_FILE = "join.json"
_RULES: Rule = {"host": text, "port": count, "secret": text, "attempt": count}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address.

    Attributes:
        host: where the run's store listens.
        port: its port.
        secret: what proves that somebody belongs to the run.
        attempt: of the agent that hosts it: after another has taken the run over, an older one is nobody's.
    """

    host: str
    port: int
    secret: str
    attempt: int = 0

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """That of a run; None where it takes in nobody, or this user may not know."""
        try:
            found = read_object(folder / _FILE)
        except (OSError, ObjectError):
            return None
        return None if problems_of(_FILE, found, _RULES) else cls(**found)

    def write(self, folder: Path) -> None:
        """Put it into a run's folder, readable for the owner alone.

        Raises:
            OSError: it cannot be written.
        """
        draft = folder / f".{_FILE}.{os.getpid()}"
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")
        draft.replace(folder / _FILE)

    @staticmethod
    def forget(folder: Path) -> None:
        """Take it away; the run takes in nobody any more."""
        with suppress(OSError):
            (folder / _FILE).unlink(missing_ok=True)
