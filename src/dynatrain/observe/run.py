"""A run is a folder. Everything that outlives its processes is in it, under names that do not change.

========================================  =====================================================================
``config.toml``                           what was asked for, resolved
``environment.json``                      versions and machine, as they were at the start
``config.json``                           the model, where the run was imported
``tokenizer.json``                        the tokenizer, once it is trained
``metrics.jsonl``, ``events.jsonl``       what happened (:mod:`dynatrain.observe.log`)
``agent.json``, ``agent.lease``           which process drives the run, or how it ended; its last sign of life
``join.json``                             where it takes in agents while it runs (:mod:`dynatrain.observe.address`)
``logs/rank_N.log``                       what rank N printed; ``logs/forkserver.log`` what its parent did
``requests/``                             what people ask for, and the answers (:mod:`dynatrain.observe.requests`)
``switches/NNN/``                         ``plan.json`` and ``certificate.json`` of each switch
``checkpoints/step_N/``                   the state before step N (:mod:`dynatrain.observe.checkpoints`)
========================================  =====================================================================
"""

import difflib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from dynatrain.observe.atomic import passing_parents
from dynatrain.observe.draft import drafted
from dynatrain.observe.mark import LEASE_SECONDS, MARK, AgentMark, Liveness, silence
from dynatrain.observe.paths import exists

RUNS = Path("runs")
"""Where runs are kept when nothing else is said."""

_SHOWN_NAME = 100
"""Letters of a run's name that other names are made from: a name has at most 255."""


class RunError(ValueError):
    """A run folder that cannot be made, found or taken; the text says what is there and what would do."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The names in a run's folder. Making the value touches no disk; see :meth:`create`, :meth:`open`, :meth:`find`.

    Attributes:
        path: the folder.
    """

    path: Path

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        config: str,
        environment: Mapping[str, object],
        fill: Callable[["RunFolder"], None] = lambda _: None,
    ) -> Self:
        """Make the folder of a new run, whole or not at all.

        Args:
            path: where; parents are made. May be an empty folder.
            config: text of ``config.toml``.
            environment: content of ``environment.json``.
            fill: writes all else that the run begins with into the folder, which has another name until that is done.

        Raises:
            RunError: the place is taken, is just being taken by another process, or cannot be written.
        """
        run = cls(path.absolute())
        try:
            run.require_free()
            with passing_parents(run.path), drafted(run.path) as draft:
                for folder in ("logs", "requests", "switches"):
                    (draft / folder).mkdir()
                (draft / "config.toml").write_text(config, encoding="utf-8")
                (draft / "environment.json").write_text(
                    json.dumps(dict(environment), indent=1) + "\n", encoding="utf-8"
                )
                fill(RunFolder(draft))
        except BlockingIOError:
            raise RunError(
                f"Another process is just making the run {run.path}. Wait for it, or name another folder, for example "
                f"{run.name}-2."
            ) from None
        except OSError as error:
            with suppress(OSError):  # the path itself may be what is wrong
                run.require_free()  # somebody else was faster
            raise run._unwritable(error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run at a path.

        Raises:
            RunError: no run is there.
        """
        run = cls(path.absolute())
        if not run.exists:
            raise RunError(f"{path} is not a run folder: a run folder holds config.toml and environment.json.")
        return run

    @classmethod
    def find(cls, text: str, root: Path = RUNS) -> Self:
        """The run that a person means by a path or by a name under ``root``.

        Raises:
            RunError: none is; the text names the nearest.
        """
        for path in (Path(text), root / text):
            if cls(path).exists:
                return cls(path.absolute())
        names = [run.name for run in cls.all(root)]
        near = difflib.get_close_matches(text, names, n=2, cutoff=0.4) or names[-2:]
        hint = f"Nearest: {', '.join(near)}." if near else "There are no runs there yet."
        raise RunError(f"No run {text!r}: neither a run folder nor a name under {root.absolute()}. {hint}")

    @classmethod
    def all(cls, root: Path = RUNS) -> tuple[Self, ...]:
        """All runs under ``root``, the one whose agent started last at the end."""
        paths = sorted(root.absolute().iterdir()) if root.is_dir() else ()
        runs = [run for run in map(cls, paths) if not run.name.startswith(".") and run.exists]
        return tuple(sorted(runs, key=cls._began))

    @classmethod
    def newest(cls, root: Path = RUNS) -> Self:
        """The run under ``root`` whose agent started last.

        Raises:
            RunError: there is none.
        """
        runs = cls.all(root)
        if not runs:
            raise RunError(f"No runs under {root.absolute()}. Start one, or name a run folder.")
        return runs[-1]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    @property
    def exists(self) -> bool:
        """Whether a run is there. Where the system will not look (a name too long, a folder closed to us), none is."""
        return exists(self.config) and exists(self.environment)

    @property
    def config(self) -> Path:
        """``config.toml``."""
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        """``environment.json``."""
        return self.path / "environment.json"

    @property
    def tokenizer(self) -> Path:
        """``tokenizer.json``."""
        return self.path / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """``events.jsonl``."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of what the ranks print."""
        return self.path / "logs"

    @property
    def requests(self) -> Path:
        """Folder of requests and answers."""
        return self.path / "requests"

    @property
    def switches(self) -> Path:
        """Folder of the switches."""
        return self.path / "switches"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; made by the first save."""
        return self.path / "checkpoints"

    def log(self, rank: int) -> Path:
        """What one rank prints."""
        return self.logs / f"rank_{rank}.log"

    def switch(self, number: int) -> Path:
        """Folder of one switch, numbered from 1; whoever writes there first makes it."""
        return self.switches / f"{number:03d}"

    @property
    def last_switch(self) -> int:
        """Number of the last switch of the run; 0 where it has had none."""
        found = [int(path.name) for path in self.switches.iterdir() if path.name.isdigit()]
        return max(found, default=0)

    def agent(self) -> AgentMark | None:
        """The agent that drives the run, or the last one that did; None where none ever has.

        Raises:
            MarkError: ``agent.json`` was damaged.
        """
        return AgentMark.read(self.path)

    def liveness(self) -> Liveness | None:
        """What has become of that agent, as seen from here; None where none ever drove the run.

        Raises:
            MarkError: ``agent.json`` was damaged.
        """
        mark = self.agent()
        return None if mark is None else mark.liveness(silence(self.path))

    def claim(self, *, take_over: bool = False) -> AgentMark:
        """Make this process the run's agent.

        Args:
            take_over: also where an agent on another host has lately given a sign of life. If it still runs, it ends.

        Raises:
            RunError: another agent drives the run, or may do so on another host; or the folder cannot be written.
            MarkError: ``agent.json`` was damaged.
        """
        try:
            with self._locked():
                last, state = self.agent(), self.liveness()
                if last is not None and (state == "alive" or (state == "elsewhere" and not take_over)):
                    raise RunError(self._driven(last, state))
                mark = AgentMark.mine(0 if last is None else last.attempt + 1)
                mark.write(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        return mark

    def succeed(self, attempt: int) -> AgentMark | None:
        """Make this process the run's agent in the place of one that is gone, if no other has been faster.

        Args:
            attempt: of the one that is gone.

        Returns:
            None where the run has another agent already, or has ended.

        Raises:
            OSError: the folder cannot be written.
            MarkError: ``agent.json`` was damaged.
        """
        with self._locked():
            last = self.agent()
            if last is None or last.attempt != attempt or last.exit is not None:
                return None
            mark = AgentMark.mine(attempt + 1)
            mark.write(self.path)
        return mark

    def _driven(self, last: AgentMark, state: Liveness) -> str:
        said = f"Run {self.name} is driven by process {last.pid} on {last.host}; one run has one agent. "
        if state == "alive":
            return f"{said}Stop that one first, or start under another run name."
        return (
            f"{said}Its last sign of life is {silence(self.path):.0f} s old. If it was killed, try again after "
            f"{LEASE_SECONDS:.0f} s of silence, or take the run over at once (train --take-over)."
        )

    def release(self, mark: AgentMark, exit_code: int) -> None:
        """Say how the agent that claimed the run has ended; nothing where another has taken the run over."""
        with self._locked():
            if self.agent() == mark:
                replace(mark, exit=exit_code).write(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other claims of the same folder out."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _began(self) -> int:
        """When the run was last started, in nanoseconds."""
        mark = self.path / MARK
        return (mark if mark.exists() else self.environment).stat().st_mtime_ns

    def require_free(self) -> None:
        """Refuse a place that is taken.

        Raises:
            RunError: a run is there, or something else.
        """
        if self.exists:
            raise RunError(f"{self.path} already holds a run. Name another folder, or go on with that run.")
        if self.path.is_dir() and (inside := sorted(entry.name for entry in self.path.iterdir())):
            raise RunError(
                f"{self.path} is no run folder and not empty (it holds {', '.join(inside[:3])}); nothing is written "
                f"into other folders. Nearest free place: {self.path / 'run'}."
            )

    def _unwritable(self, error: OSError) -> RunError:
        free = Path(tempfile.gettempdir()) / "runs" / self.name[:_SHOWN_NAME]
        return RunError(
            f"The run folder {self.path} cannot be written: {error.strerror}. A run needs a folder that this user "
            f"may write; for example {free}."
        )
