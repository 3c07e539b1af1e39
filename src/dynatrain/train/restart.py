"""A cold restart under torchrun: new processes, of which each imports torch and begins from a checkpoint.

This side of it starts them, waits, and leaves none of them. No torch here: new ranks import it themselves, and what
they do then is :mod:`dynatrain.train.restarted`. As ``python -m dynatrain.train.restart launch ...`` this is torchrun,
and as ``... begin ...``, which torchrun starts, a new rank. Both end with the process that started them: SIGTERM has
torchrun end its ranks, and whom it cannot end any more the kernel kills.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dynatrain.cluster.kernel import signal_me_when_parent_ends
from dynatrain.cluster.spawner import environment_below
from dynatrain.train.restart_order import Begun, Order

_MODULE = "dynatrain.train.restart"
_SAID, _READY, _FAILED = "torchrun.log", "ready", "failed"
_GRACE_SECONDS = 10.0


class RestartError(RuntimeError):
    """The new ranks did not come; the text has their words."""


def begin_anew(folder: Path, ranks: int, *, timeout: float) -> list[Begun]:
    """Start new ranks under torchrun, and wait until they have begun and ended. In the main thread alone.

    The kernel ties them to the thread that starts them.

    Args:
        folder: where the old ranks have left an :class:`Order` and their checkpoint; logs go there, too.
        ranks: how many.
        timeout: seconds that this may take.

    Returns:
        By rank.

    Raises:
        RestartError: one failed, or they were not there in time.
    """
    settings = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", _MODULE, "launch", str(os.getpid()), str(folder), str(ranks)]
    with (folder / _SAID).open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=environment_below() | settings,
        )
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise RestartError(f"the new ranks were not ready within {timeout:g} s") from None
    finally:
        _end(process)
    if code:
        raise RestartError(_words(folder, code))
    told = [json.loads((folder / f"{_READY}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [Begun(**one) for one in told]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End torchrun, which ends its ranks, if it has not ended yet."""
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _words(folder: Path, code: int) -> str:
    """What the first rank that failed has said; where none did, the last of what torchrun said."""
    said = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{_FAILED}.*")]
    if said:
        first = min(said, key=lambda one: one["when"])
        return f"new rank {first['rank']}: {first['words']}"
    lines = (folder / _SAID).read_text(encoding="utf-8", errors="replace").splitlines()
    last = [" ".join(line.split()) for line in lines if line.strip("=- ")][-4:]
    return f"torchrun ended with code {code}: {'; '.join(last)}"


def _launch(folder: str, ranks: str) -> None:
    """Be torchrun."""
    from torch.distributed.run import main  # noqa: PLC0415 - this process alone is to have torch

    words = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    main([*words, "-m", _MODULE, "begin", str(os.getpid()), folder])


def _begin(folder: Path) -> None:
    """Be a new rank."""
    rank = os.environ["RANK"]
    try:
        order = Order.read(folder)
        from dynatrain.train.restarted import begin  # noqa: PLC0415 - torch, which is part of what is measured

        (folder / f"{_READY}.{rank}").write_text(json.dumps(asdict(begin(order, folder))), encoding="utf-8")
    except Exception as error:
        words = "".join(traceback.format_exception_only(error)).strip()
        told = {"rank": int(rank), "when": time.monotonic(), "words": words}
        (folder / f"{_FAILED}.{rank}").write_text(json.dumps(told), encoding="utf-8")
        raise


def _main(role: str, parent: str, folder: str, more: Sequence[str]) -> None:
    signal_me_when_parent_ends(signal.SIGTERM if role == "launch" else signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # it has ended already
    if role == "launch":
        _launch(folder, *more)
    else:
        _begin(Path(folder))


if __name__ == "__main__":
    _main(*sys.argv[1:4], sys.argv[4:])
