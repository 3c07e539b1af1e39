"""A cluster in numbers: what carries bytes between ranks, and how much of them in a second.

Rates are those that a job can reach, one way, in GB/s (1e9 bytes). The named ones are what vendors write on their
sheets; none of them was measured here.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dynatrain.observe.paths import exists, user_path


class MachineError(ValueError):
    """A description of a cluster that cannot be; with everything that is wrong."""

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Nodes of equal ranks, their links, and the network between them.

    Attributes:
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``.
        nvlink_gb_s: of one rank to the others of its node; 0 where there is none.
        pcie_gb_s: of one rank to its host: bounds what leaves the node, and is the way to the others of the node where
            there is no NVLink; 0 for no bound.
        fabric_gb_s: of all ranks of one node to each other together (shared memory of a host); 0 for no bound.
        nic_gb_s: of one rank to other nodes.
        node_nic_gb_s: of all ranks of a node together; 0 for ``ranks_per_node`` times ``nic_gb_s``.
        rails: networks side by side; rank ``r`` is on rail ``r % rails`` of its node, and what stays on a rail crosses
            no core. 1 for a network in which everything between nodes crosses it.
        oversubscription: how many times less the core carries than all network cards together.
        copy_gb_s: written by one rank in its own memory.
        processors: of a node, that its ranks share for what they do themselves (copying, hashing, sending, receiving,
            dealing with pieces); 0 where each rank has its own.
        send_gb_s: sent by one rank's processor, packing and checksums included; 0 where that is not its work.
        receive_gb_s: received by it likewise, beside the copy.
        piece_us: what each box of one state costs the processor of each of its ends, beside its bytes.
        switch_us: what a switch costs beside its rounds: binding, the last vote.
        checksum_gb_s: of what it sends and receives, hashed by one rank, while it moves nothing; 0 leaves hashing out.
        message_us: what each message costs each end, beside its bytes.
        round_us: what each round costs a rank that takes part: posting, checksums, waiting for the last.
        vote_us: what all ranks together need to agree on a round of ``tight``.
        message_bytes: longest message.
    """

    ranks_per_node: int = 8
    nvlink_gb_s: float = 0.0
    pcie_gb_s: float = 0.0
    fabric_gb_s: float = 0.0
    nic_gb_s: float = 50.0
    node_nic_gb_s: float = 0.0
    rails: int = 1
    oversubscription: float = 1.0
    copy_gb_s: float = 1000.0
    processors: int = 0
    send_gb_s: float = 0.0
    receive_gb_s: float = 0.0
    piece_us: float = 0.0
    switch_us: float = 0.0
    checksum_gb_s: float = 0.0
    message_us: float = 5.0
    round_us: float = 20.0
    vote_us: float = 500.0
    message_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise MachineError("this is no cluster", problems)

    def _problems(self) -> list[str]:
        least = {"ranks_per_node": 1, "rails": 1, "oversubscription": 1, "message_bytes": 1}
        found = [
            f"{one.name} is {getattr(self, one.name)}; at least {least.get(one.name, 0)}"
            for one in fields(self)
            if not least.get(one.name, 0) <= getattr(self, one.name) < float("inf")
        ]
        found += [f"{name} is 0; above 0" for name in ("nic_gb_s", "copy_gb_s") if getattr(self, name) == 0]
        if self.ranks_per_node > 1 and not self.nvlink_gb_s and not self.pcie_gb_s:
            found.append("neither nvlink_gb_s nor pcie_gb_s is given, and a node has several ranks; name one")
        if not found and self.ranks_per_node % self.rails:
            found.append(f"rails is {self.rails}, which does not divide ranks_per_node, {self.ranks_per_node}")
        return found

    @property
    def near(self) -> float:
        """Bytes per second of one rank to the others of its node."""
        return 1e9 * (self.nvlink_gb_s or self.pcie_gb_s or self.nic_gb_s)

    @property
    def far(self) -> float:
        """Bytes per second of one rank to other nodes, with everybody else silent."""
        return 1e9 * min(self.nic_gb_s, self.pcie_gb_s or self.nic_gb_s)

    @property
    def rail(self) -> float:
        """Bytes per second of the network cards of one node that are on one rail."""
        return 1e9 * (self.node_nic_gb_s or self.ranks_per_node * self.nic_gb_s) / self.rails


_HOPPER = Machines(nvlink_gb_s=450, pcie_gb_s=64, nic_gb_s=50, rails=8, copy_gb_s=1500)
NAMED = {
    "h100": _HOPPER,
    "a100": replace(_HOPPER, nvlink_gb_s=300, pcie_gb_s=32, nic_gb_s=25, copy_gb_s=900),
    "gb200": replace(_HOPPER, ranks_per_node=72, nvlink_gb_s=900, pcie_gb_s=0, rails=1, copy_gb_s=4000),
    "even50": Machines(ranks_per_node=1, nic_gb_s=50, copy_gb_s=1500),
    "ethernet": Machines(pcie_gb_s=25, nic_gb_s=12.5, node_nic_gb_s=12.5, oversubscription=2, copy_gb_s=900),
}
"""Clusters by name: 8 GPUs on NVLink with a network card of 400 Gb/s each (``h100``) or of 200 (``a100``); racks of 72
(``gb200``); 50 GB/s per GPU and no faster way anywhere (``even50``); 8 GPUs on PCIe that share 100 Gb/s, with a core of
half of that (``ethernet``)."""


def read_machines(text: str) -> tuple[Machines, int | None]:
    """The cluster that ``text`` names, and its ranks where the name says them: ``h100``, ``h100x64``, or a TOML file.

    Raises:
        MachineError: there is none of that name, or the file describes none.
    """
    match = re.fullmatch(r"([a-z][a-z0-9]*?)(?:x([1-9][0-9]{0,5}))?", text)
    if match and match[1] in NAMED:
        return NAMED[match[1]], int(match[2]) if match[2] else None
    path = user_path(text)
    if exists(path):
        return _of_file(path), None
    near = difflib.get_close_matches(text, NAMED, n=2, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    rule = f"a cluster is one of {', '.join(NAMED)}, with its ranks (h100x64) or without, or a TOML file{hint}"
    raise MachineError(f"there is no cluster {text!r}", (rule,))


def _of_file(path: Path) -> Machines:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise MachineError(f"{path} cannot be read", (str(error) or "it is nested too deeply",)) from None
    known = {one.name: type(one.default) for one in fields(Machines)}
    problems = []
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            problems.append(f"{key} is unknown; " + (f"nearest: {near[0]}" if near else f"known: {', '.join(known)}"))
        elif isinstance(value, bool) or not isinstance(value, (int,) if known[key] is int else (int, float)):
            problems.append(f"{key} is {value!r}; a{' whole' if known[key] is int else ''} number")
    if problems:
        raise MachineError(f"{path} describes no cluster", tuple(problems))
    return Machines(**table)
