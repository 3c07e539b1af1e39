"""What the kernel says of a process: enough to tell it from a later one that was given the same number."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """One line of ``/proc/PID/stat``.

    Attributes:
        pid: its number, which the kernel gives again once the process is gone.
        parent: number of its parent.
        state: one letter; ``T`` stopped, ``Z`` ended and not yet collected, ``D`` in a system call that nothing ends.
        started: clock ticks from boot to its start; with ``pid`` and the boot it names one process for good.
    """

    pid: int
    parent: int
    state: str
    started: int


def process_stat(pid: int) -> ProcessStat | None:
    """The process that has this number now; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return ProcessStat(pid=pid, state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def start_of(pid: int) -> int:
    """When the process that has this number now was started; -1 where none has it, or it has ended uncollected."""
    stat = process_stat(pid)
    return -1 if stat is None or stat.state == "Z" else stat.started


def children_of(pid: int) -> tuple[int, ...]:
    """Numbers of the processes whose parent is ``pid`` at this moment."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return tuple(n for n in numbers if (stat := process_stat(n)) is not None and stat.parent == pid)


def boot_id() -> str:
    """Identity of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
