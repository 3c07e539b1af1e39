"""A run's agent that another program holds: a Ray actor, a controller, a notebook.

An agent needs the main thread of a process of its own: for signals, and because its ranks end with it. So the object
starts that process and keeps one end of a pipe to it. When the holder ends, also by SIGKILL, the pipe closes, and the
agent takes that for SIGTERM: the run is saved where it is saved at its end, and nothing of it is left.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dynatrain.app.handle import RunHandle
from dynatrain.app.mistake import MistakeError
from dynatrain.observe.run import RunFolder

_POLL_SECONDS = 0.1


class RunAgent(RunHandle):
    """One run, driven by this object, and asked as any :class:`~dynatrain.app.handle.RunHandle`.

        trainer = ray.remote(dynatrain.RunAgent).remote("run.toml", run="/shared/runs/policy")
        ray.get(trainer.start.remote())
        ray.get(trainer.lend.remote(ranks=[2, 3]))

    The process is not started before :meth:`start`. Several threads may call; each method blocks its own.

    Args:
        config: the run's TOML file.
        run: the run's folder, which the agent makes, or goes on with.
        settings: as on the command line: ``--steps=100``.
        timeout: seconds to wait for each answer.
    """

    def __init__(
        self, config: str | Path, *, run: str | Path, settings: Sequence[str] = (), timeout: float = 300.0
    ) -> None:
        self._run = str(Path(run).absolute())
        self.timeout = timeout
        self._words = ["train", str(config), "--run", self._run, *settings]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Start it; returns its process number once it has the run.

        What it prints goes to ``RUN.agent.log`` beside the run's folder.

        Raises:
            MistakeError: it was started already, or has ended at once; with the last that it printed.
        """
        if self._process is not None:
            raise MistakeError(f"the agent of {self._run} was started already, as process {self._process.pid}")
        said = Path(f"{self._run}.agent.log")
        said.parent.mkdir(parents=True, exist_ok=True)
        with said.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dynatrain.app.held", *self._words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        while not self._claimed():
            if self._process.poll() is not None:
                words = " ".join(said.read_text(errors="replace").strip().splitlines()[-3:])
                raise MistakeError(f"the agent has ended with code {self._process.returncode}: {words}")
            time.sleep(_POLL_SECONDS)
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs, or was not started."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout: float) -> int | None:
        """As :meth:`poll`, waited for at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self.poll()

    def end(self, timeout: float = 60.0) -> int | None:
        """End the run as SIGTERM does; the exit code, None where it is not gone after ``timeout`` seconds."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def _claimed(self) -> bool:
        """Whether the run is the process's."""
        run = RunFolder(Path(self._run))
        mark = run.agent() if run.exists else None
        return mark is not None and self._process is not None and mark.pid == self._process.pid


def _end_with_holder() -> None:
    """Take the end of whoever holds the other end of standard input for SIGTERM."""
    with os.fdopen(os.dup(0), "rb") as held:
        held.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from dynatrain.app.main import main

    threading.Thread(target=_end_with_holder, name="holder", daemon=True).start()
    sys.exit(main())
