"""``dynatrain events [RUN]``."""

import json as json_text
import time

from dynatrain.app.cli import Run, call
from dynatrain.app.output import emit, say
from dynatrain.app.runs import find_run
from dynatrain.observe.log import Tail

_STAMP = ("time", "kind", "generation", "attempt")


def run(words: list[str]) -> int:
    """The command."""
    return call(events, words)


def events(run: Run = "", /, *, json: bool = False) -> int:
    """What has happened to a run, oldest first.

    Args:
        run: name or folder; by default the newest.
        json: print one JSON object.
    """
    records = Tail(find_run(run).events).new()
    if json:
        emit({"events": records})
        return 0
    for record in records:
        at = time.strftime("%H:%M:%S", time.localtime(record["time"]))
        fields = (f"{key}={_value(value)}" for key, value in record.items() if key not in _STAMP)
        say(f"{at}  {record['kind']}  {'  '.join(fields)}")
    return 0


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json_text.dumps(value)
