"""The parent of the ranks: imports torch and the ranks' module once, then forks ranks that start in milliseconds.

Started fresh as ``python -m dynatrain.cluster.forkserver DESCRIPTOR ENTRY AGENT_PID``, with one end of a
``SOCK_SEQPACKET`` pair. It keeps one thread, for a fork beside threads copies locks that nobody will ever open, and a
parent that has run torch in two threads leaves children that hang; and it never touches CUDA, whose state no fork
survives. As the ranks' parent it alone knows for certain which of their process numbers are still theirs: so the agent
signals ranks through it, and hears of their ends from it.

Orders, one JSON object a packet: ``{"fork": CONTEXT}``, ``{"signal": N, "member": M}``. When the channel closes, which
it does when the agent ends however it ends, every process below the server is killed and the server ends.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynatrain.cluster.context import RankContext, Report
from dynatrain.cluster.kernel import AGENT_PRIORITY, adopt_orphans, signal_me_when_parent_ends, take_realtime
from dynatrain.cluster.rank import Entry, live
from dynatrain.observe.process import children_of

_HELD = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
_SWEEP_SECONDS = 2.0
_ENDS = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)


class NotForkableError(RuntimeError):
    """The ranks' module leaves the process in a state that no fork survives."""


@dataclass(frozen=True, slots=True)
class _Child:
    member: int
    words: int  # the reading end of the pipe for its error text


class ForkServer:
    """The server's loop.

    Args:
        channel: to the agent.
        entry: what ranks run.
        agent: the agent's process number.
    """

    def __init__(self, channel: socket.socket, entry: Entry, agent: int) -> None:
        self._channel = channel
        self._entry = entry
        self._agent = agent
        self._children: dict[int, _Child] = {}
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in _HELD:
            signal.signal(number, lambda *_: None)  # the byte on the waker is all that is wanted
        signal.set_wakeup_fd(self._waker)

    def serve(self) -> None:
        """Obey until the agent is gone, then leave nothing behind."""
        self._tell(Report(kind="ready", pid=os.getpid()))
        while os.getppid() == self._agent:
            ready, _, _ = select.select([self._channel, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
            self._collect()
            if self._channel in ready:
                order = self._channel.recv(1 << 16)
                if not order:
                    break
                self._obey(json.loads(order))
        self._sweep()

    def _obey(self, order: dict[str, object]) -> None:
        if "fork" in order:
            self._fork(RankContext(**order["fork"]))  # type: ignore[arg-type]
            return
        for pid, child in self._children.items():
            if child.member == order["member"]:
                _signal_group(pid, int(str(order["signal"])))

    def _fork(self, context: RankContext) -> None:
        if context.realtime:
            take_realtime(AGENT_PRIORITY)  # else ranks that spin would keep the server from ending them
        heard, words = os.pipe2(os.O_CLOEXEC)
        server = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # until the child has handlers of its own
        pid = os.fork()
        if pid == 0:
            self._forget(heard)
            live(self._entry, context, parent=server, words=words)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
        os.close(words)
        self._children[pid] = _Child(context.member, heard)
        self._tell(Report(kind="forked", member=context.member, pid=pid))

    def _forget(self, heard: int) -> None:
        """In the child: let go of everything that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for handle in (heard, self._wake, self._waker, *(child.words for child in self._children.values())):
            os.close(handle)
        self._channel.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)

    def _collect(self) -> None:
        """Report what has happened to children since the last call."""
        flags = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, flags | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            child = self._children.get(found.si_pid)
            if child is not None and found.si_code in _ENDS:
                # Before the number is given back: helpers that the rank has left behind would keep its memory.
                _signal_group(found.si_pid, signal.SIGKILL)
            os.waitid(os.P_PID, found.si_pid, flags)
            if child is not None:
                self._report(child, found)

    def _report(self, child: _Child, found: os.waitid_result) -> None:
        known = {"member": child.member, "pid": found.si_pid}
        if found.si_code not in _ENDS:
            continued = found.si_code == os.CLD_CONTINUED
            kind = "continued" if continued else "stopped"
            self._tell(Report(kind=kind, signal=0 if continued else found.si_status, **known))
            return
        del self._children[found.si_pid]
        os.set_blocking(child.words, False)
        try:
            left = os.read(child.words, 1 << 16)
        except BlockingIOError:
            left = b""  # a helper outside the rank's group still holds the other end
        os.close(child.words)
        words = json.loads(left) if left else {}
        by_signal = found.si_code != os.CLD_EXITED
        code, number = (0, found.si_status) if by_signal else (found.si_status, 0)
        self._tell(Report(kind="ended", code=code, signal=number, **known, **words))

    def _tell(self, report: Report) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone: the loop sees it next
            self._channel.send(report.to_json().encode())

    def _sweep(self) -> None:
        """Kill everything below this process. Orphans become its children, so a few rounds reach all."""
        end = time.monotonic() + _SWEEP_SECONDS
        while (below := children_of(os.getpid())) and time.monotonic() < end:
            for pid in below:
                os.kill(pid, signal.SIGKILL)  # a child that is not collected keeps its number: no one else is hit
            time.sleep(0.01)
            self._collect()


def _signal_group(pid: int, number: int) -> None:
    """Signal a child that is not collected yet, with the helpers in its session."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # forked a moment ago, without a session of its own yet


def load(entry: str) -> Entry:
    """Import what ranks run, and torch, and make sure that the process can be forked.

    Args:
        entry: ``package.module:function``; or with a text behind it, of which the function makes what ranks run.

    Raises:
        NotForkableError: the import has started threads or CUDA.
    """
    where, _, given = entry.partition(" ")
    module, _, name = where.partition(":")
    gc.disable()  # what an import makes stays: looking through it again and again is a fifth of the time
    found = getattr(importlib.import_module(module), name)
    function: Entry = found(given) if given else found
    import torch  # noqa: PLC0415 - here, so that the agent's messages need no torch

    torch.set_num_threads(1)
    threads = [path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    if len(threads) != 1:
        raise NotForkableError(
            f"Importing {given or module} starts {len(threads) - 1} thread(s) ({', '.join(threads[1:])}); ranks are "
            "forked from a process with one. Start threads inside the entry function."
        )
    if torch.cuda.is_initialized():
        raise NotForkableError(
            f"Importing {given or module} initialises CUDA; use CUDA only inside the entry function."
        )
    gc.enable()
    gc.collect()
    gc.freeze()  # what is shared with the ranks stays shared: the collector would write into its pages
    return function


def main() -> None:
    """Start serving, as the module's text says."""
    descriptor, entry, agent = sys.argv[1:4]
    adopt_orphans()
    signal_me_when_parent_ends(signal.SIGTERM)  # wakes the loop, which then sees that the parent is another
    with socket.socket(fileno=int(descriptor)) as channel:
        os.set_inheritable(channel.fileno(), False)
        try:
            function = load(entry)
        except BaseException as error:  # noqa: BLE001 - the agent is told, whatever it was
            traceback.print_exc()
            words = "".join(traceback.format_exception_only(error)).strip()
            channel.send(Report(kind="broken", words=words).to_json().encode())
        else:
            ForkServer(channel, function, int(agent)).serve()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk
            stream.flush()
    # No interpreter shutdown: half a second of torch taking its operators apart, for which the agent would wait.
    os._exit(0)


if __name__ == "__main__":
    main()
