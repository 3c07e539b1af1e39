"""A cut link: the connections of a process drop whatever arrives, and nobody is told. No privileges over the network.

The kernel drops every segment that comes to a socket whose filter takes none, before it acknowledges it. So both ends
see what they would see of a cable that was pulled: silence, and no reset.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: take no byte of any packet
_PROGRAM = struct.pack("HxxxxxxQ", 1, ctypes.addressof(_NOTHING))


def cut(pids: Collection[int]) -> int:
    """Cut every TCP connection of these processes but those among themselves; how many there were.

    Connections that are made later are not cut: whoever wants a link to stay cut calls it again and again.
    """
    ends = [end for pid in pids for end in _connections(pid)]
    here = {_port(end.getsockname()) for end in ends}
    count = 0
    for end in ends:
        with end, suppress(OSError):
            if _port(end.getpeername()) not in here:
                end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
                count += 1
    return count


def _port(address: tuple) -> int:
    return address[1]


def _connections(pid: int) -> list[socket.socket]:
    """The TCP connections of another process, as sockets of this one."""
    libc, found = ctypes.CDLL(None, use_errno=True), []
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return found
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile, or no connection
                if not str(path.readlink()).startswith("socket:"):
                    continue
                number = libc.syscall(_PIDFD_GETFD, handle, int(path.name), 0)
                if number < 0:
                    continue
                end = socket.socket(fileno=number)
                with suppress(OSError):
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                        end.getpeername()
                        found.append(end)
                        continue
                end.close()
    except FileNotFoundError:  # it has ended
        pass
    finally:
        os.close(handle)
    return found
