"""A run is a folder. Everything that outlives its processes is in it, under names that do not change.

========================================  =====================================================================
``config.toml``                           what was asked for, resolved
``environment.json``                      versions and machine, as they were at the start
``config.json``                           the model, where the run was imported
``tokenizer.json``                        the tokenizer, once it is trained
``metrics.jsonl``, ``events.jsonl``       what happened (:mod:`dynatrain.observe.log`)
``agent.json``                            which process drives the run, or how it ended
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
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from dynatrain.observe.atomic import passing_parents, write_atomically
from dynatrain.observe.process import boot_id, start_of

RUNS = Path("runs")
"""Where runs are kept when nothing else is said."""

_SHOWN_NAME = 100
"""Letters of a run's name that other names are made from: a name has at most 255."""

Liveness = Literal["alive", "ended", "gone", "elsewhere"]
"""An agent's process runs; has ended and said how; was killed; or is on another host, where we cannot look."""


class RunError(ValueError):
    """A run folder that cannot be made, found or taken; the text says what is there and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMark:
    """Which process drives a run: the content of ``agent.json``.

    Attributes:
        pid: the agent's process number.
        started: its start, in clock ticks since boot: a later process with the same number has another.
        boot: identity of the boot that both numbers belong to.
        host: where it runs.
        attempt: 0 for the first agent of the run, one more for each later one.
        exit: its exit code once it has ended; None before.
    """

    pid: int
    started: int
    boot: str
    host: str
    attempt: int
    exit: int | None = None

    def liveness(self) -> Liveness:
        """What has become of that process, as seen from here."""
        if self.exit is not None:
            return "ended"
        if self.host != socket.gethostname():
            return "elsewhere"
        if self.boot != boot_id() or start_of(self.pid) != self.started:
            return "gone"
        return "alive"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The names in a run's folder. Making the value touches no disk; see :meth:`create`, :meth:`open`, :meth:`find`.

    Attributes:
        path: the folder.
    """

    path: Path

    @classmethod
    def create(cls, path: Path, *, config: str, environment: Mapping[str, object]) -> Self:
        """Make the folder of a new run, whole or not at all.

        Args:
            path: where; parents are made. May be an empty folder.
            config: text of ``config.toml``.
            environment: content of ``environment.json``.

        Raises:
            RunError: the place is taken, or cannot be written.
        """
        run = cls(path.absolute())
        try:
            run.require_free()
            with passing_parents(run.path):
                run._make(config, environment)
        except OSError as error:
            raise run._unwritable(error) from error
        return run

    def _make(self, config: str, environment: Mapping[str, object]) -> None:
        """Write everything under another name, then take the right one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{self.name[:_SHOWN_NAME]}.", dir=self.path.parent))
        try:
            draft.chmod(0o755)
            for folder in ("logs", "requests", "switches"):
                (draft / folder).mkdir()
            (draft / "config.toml").write_text(config, encoding="utf-8")
            (draft / "environment.json").write_text(json.dumps(dict(environment), indent=1) + "\n", encoding="utf-8")
            draft.rename(self.path)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise

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
        runs = [run for run in map(cls, paths) if run.exists]
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
        try:
            return self.config.is_file() and self.environment.is_file()
        except OSError:
            return False

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
        """The agent that drives the run, or the last one that did; None where none ever has."""
        try:
            return AgentMark(**json.loads((self.path / "agent.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def claim(self) -> AgentMark:
        """Make this process the run's agent.

        Raises:
            RunError: another agent drives the run, or may do so on another host; or the folder cannot be written.
        """
        try:
            with self._locked():
                last = self.agent()
                if last is not None and last.liveness() in ("alive", "elsewhere"):
                    raise RunError(
                        f"Run {self.name} is driven by process {last.pid} on {last.host}; one run has one agent. "
                        "Stop that one first, or start under another run name."
                    )
                mark = AgentMark(
                    pid=os.getpid(),
                    started=start_of(os.getpid()),
                    boot=boot_id(),
                    host=socket.gethostname(),
                    attempt=0 if last is None else last.attempt + 1,
                )
                self._write_mark(mark)
        except OSError as error:
            raise self._unwritable(error) from error
        return mark

    def release(self, mark: AgentMark, exit_code: int) -> None:
        """Say how the agent that claimed the run has ended."""
        self._write_mark(replace(mark, exit=exit_code))

    def _write_mark(self, mark: AgentMark) -> None:
        write_atomically(self.path / "agent.json", json.dumps(asdict(mark)) + "\n")

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
        mark = self.path / "agent.json"
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
