"""What happened, one JSON object a line, for people and programs.

Every line has ``time`` (seconds since 1970), ``kind``, ``generation`` (of the world), ``attempt`` (of the run: 0 for
its first agent) and the fields of its kind. ``member`` is a rank's number in the run, never used again; ``rank`` its
place in the world of the moment, -1 outside. The kinds of ``events.jsonl``:

==================  =========================================================================================
``agent_started``   ``pid, node, nodes, host, world_size, seats, device, backend, realtime, note``; ``seats`` are the
                    nodes of the first world's ranks, by rank
``ranks_started``   ``ranks, pids, seconds {server, fork}``: start to ready, then to all local ranks forked
``rank_stopped``    ``rank, member, pid, signal``: halted by a signal, for example SIGSTOP; not an end yet
``rank_continued``  ``rank, member, pid``
``rank_ended``      ``rank, member, pid, code, signal, by_agent, error, step, phase, switch``: each end, also a good one
``crossing``        ``id, world, stage, members, nodes, newcomers, leavers, layout, reason, lost``: the way to the world
                    of that number, a line for each stage: ``coming``, ``asked``, then ``done`` or ``undone``; ``nodes``
                    are those of the members
``newcomer``        ``rank, member, pid``: forked for a world to come
``lent``            ``id, places``: places of the run that another program has from now on, all of them; empty for none
``parking``         ``step, switch, parked``: all state has left the devices, or come back
``ready``           ``layout, held_bytes``: prepared ahead, with what each rank holds for it; empty for nothing any more
``overdue``         ``member, pid, seconds``: a leaver that had not ended in time and was killed
``request``         ``id, verb, arguments, by``: taken from the run folder
``answer``          ``id, outcome, message, switch``
``signal``          ``signal, node``: the agent was asked to end
``host_joined``     ``node, host, place, pid``: an agent has come to a run that had begun
``join_refused``    ``who, reason``: another was not taken in
``host_leaves``     ``node, seconds``: a signal has told the agent that its host goes, and in how many seconds
``host_left``       ``node``: that agent has ended, and the run goes on without its host
``lead_lost``       ``node, reason``: this node's agent has lost the one that leads, and ended its ranks
``succession``      ``hosts, world_size, layout, note, seconds``: this agent leads from here on, with these hosts;
                    ``seconds`` since it found the one before gone
``deposed``         ``reason``: an agent that was taken for dead sees that it was followed, and ends
``run_failed``      ``reason``: the first cause; the run ends with exit code 3
``agent_ended``     ``exit, seconds``: nothing of the run is left on this node
``save``            ``step, outcome, message``: a checkpoint is complete, or could not be made
``load``            ``step, checkpoint, layout``: the run went on from there
``loss``            ``switch, lost [{rank, member}], why, step, now, files, bytes, why_no_newer, redone, seconds``:
                    lost at step ``now``; the others went on from ``step``, of which every box was left
``snapshot``        ``step, seconds, own_bytes, sent_bytes, keeper``: taken against losses, whole on rank 0; by rank
``not_admitted``    ``member, reason``: a newcomer whose crossing was given up; its process ends with code 0
``switch``          ``switch, phase, ...``: one line for each phase of a switch, then one with its outcome
==================  =========================================================================================

The kinds of ``metrics.jsonl`` are ``step`` and ``validation``, whose fields belong to the training loop, and ``loop``:
``step``, ``layout``, and what a loop of the user's own notes.
"""

import errno
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dynatrain.observe.fields import Rule, count, flag, number, problems_of, text
from dynatrain.observe.objects import ObjectError, parse_object

_LOG = logging.getLogger(__name__)

KINDS = frozenset(
    {
        "agent_started",
        "ranks_started",
        "rank_stopped",
        "rank_continued",
        "rank_ended",
        "request",
        "answer",
        "signal",
        "lead_lost",
        "succession",
        "deposed",
        "run_failed",
        "agent_ended",
        "crossing",
        "host_joined",
        "join_refused",
        "host_leaves",
        "host_left",
        "newcomer",
        "lent",
        "overdue",
        "parking",
        "ready",
        "save",
        "snapshot",
        "load",
        "loss",
        "not_admitted",
        "switch",
        "step",
        "validation",
        "loop",
    }
)
"""All kinds of lines; the table above says what each tells."""


def _counts_or_none(value: object) -> bool:
    """Seats, which older versions did not tell."""
    return value is None or (isinstance(value, list) and all(map(count, value)))


_NEEDED: dict[str, Rule] = {"time": number, "kind": text}
_NEEDED_OF: dict[str, dict[str, Rule]] = {
    "step": {"step": count, "loss": number, "tokens_per_second": number, "seconds": number, "layout": text},
    "validation": {"step": count, "loss": number, "samples": count},
    "switch": {"switch": count, "phase": text},
    "save": {"step": count, "outcome": text},
    "loss": {"step": count, "now": count, "why": text},
    "agent_started": {"world_size": count, "nodes": count, "seats": _counts_or_none},
    "lent": {"places": lambda value: isinstance(value, str)},
    "parking": {"step": count, "parked": flag},
    "ready": {"layout": lambda value: isinstance(value, str), "held_bytes": [count]},
    "crossing": {"world": count, "stage": text, "members": [count], "nodes": [count], "layout": text},
    "host_joined": {"node": count, "host": text},
    "host_left": {"node": count},
}
"""What readers of a line, and of one of a kind, rely on."""


class Log:
    """Appends lines to one file, each with a single write, so that several processes can share it.

    A line that the disk does not take (it may be full) is told on standard error and left out: books are not worth a
    run. The first one that is taken again says how many are missing.

    Args:
        path: the file; made where it is missing.
        generation: number of the world that writes.
        attempt: number of the run's agent.
    """

    def __init__(self, path: Path, *, generation: int, attempt: int) -> None:
        self._stamp = {"generation": generation, "attempt": attempt}
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._path, self._missed = path, 0
        size = os.fstat(self._handle).st_size
        # Whether a writer was killed within its line, or the disk took a part of it: the next must not be glued to it.
        self._torn = bool(size and os.pread(self._handle, 1, size - 1) != b"\n")

    def enter(self, generation: int) -> None:
        """From here on lines are of another world."""
        self._stamp["generation"] = generation

    def write(self, kind: str, **fields: object) -> None:
        """Append one line.

        Raises:
            LookupError: the table of kinds lacks this one; readers would not know it.
        """
        if kind not in KINDS:
            raise LookupError(f"{kind!r} is not in the table of kinds in {__name__}")
        record = {"time": time.time(), "kind": kind, **self._stamp, **fields}
        try:
            self._append((json.dumps(record) + "\n").encode())
        except OSError as error:
            self._missed += 1
            if self._missed == 1:
                _LOG.warning("%s is not written: %s (%s); the run goes on", self._path, error, kind)
        else:
            if self._missed:
                _LOG.warning("%s is written again; %d lines are missing", self._path, self._missed)
            self._missed = 0

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(self._handle, data)
        if written < len(data):  # the last bytes that there was room for
            self._torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tail:
    """Reads a log while it grows.

    A last line without its end is left for the next reading: its writer may still be at it. A line inside the file that
    is no record of its kind was torn by the death of its writer and is counted in :attr:`torn`.

    Args:
        path: the file; may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.torn = 0

    def new(self) -> list[dict[str, Any]]:
        """The records written since the last call, oldest first."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.splitlines() if (record := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        with suppress(ObjectError):
            record = parse_object(line)
            kind = record.get("kind")
            needed = _NEEDED | (_NEEDED_OF.get(kind, {}) if isinstance(kind, str) else {})
            if not any(problems_of(key, record.get(key), rule) for key, rule in needed.items()):
                return record
        self.torn += 1
        return None
