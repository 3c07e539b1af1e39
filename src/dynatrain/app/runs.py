"""Reading a run's folder: its configuration, its progress, its switches."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynatrain.config.own import load_own
from dynatrain.config.run import RunConfig
from dynatrain.judge.certificate import check_certificate
from dynatrain.layout.text import parse_layout
from dynatrain.observe.log import Tail
from dynatrain.observe.objects import ObjectError, read_object
from dynatrain.observe.run import RunFolder


def find_run(text: str) -> RunFolder:
    """The run that ``text`` names; the newest where it is empty.

    Raises:
        RunError: there is none.
    """
    return RunFolder.find(text) if text else RunFolder.newest()


def run_path(text: str, root: Path) -> Path:
    """Where a new run of that name, or at that path, is put."""
    return Path(text) if "/" in text else root / text


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is, by its ``metrics.jsonl``.

    Attributes:
        steps: steps that it was asked for.
        lines: all ``step`` lines, oldest first.
        validation: all ``validation`` lines, oldest first.
    """

    steps: int
    lines: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, run: RunFolder) -> "Progress":
        """Read it."""
        records = Tail(run.metrics).new()
        return cls(
            steps=config_of(run).steps,
            lines=tuple(record for record in records if record["kind"] == "step"),
            validation=tuple(record for record in records if record["kind"] == "validation"),
        )

    @property
    def last(self) -> dict[str, Any]:
        """The newest step line; empty where there is none."""
        return self.lines[-1] if self.lines else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWorld:
    """The ranks that a run has, by its ``events.jsonl``; of one that has ended, those that it had.

    Attributes:
        generation: number of the world.
        members: by rank.
        layout: as text; the first steps of a world may not have told it yet.
        ranks_per_node: of the first world, as plans count them; None for all on one node.
        lent: the places that are lent, for people; empty where none are.
        parked: the step before which the state was parked; None where it is not.
        ready: layout that is prepared ahead, and the most bytes that a rank holds for it; None where there is none.
        nodes: where the ranks are, by rank.
        hosts: names of the hosts that have an agent of the run, by node.
    """

    generation: int
    members: tuple[int, ...]
    layout: str
    ranks_per_node: int | None = None
    lent: str = ""
    parked: int | None = None
    ready: tuple[str, int] | None = None
    nodes: tuple[int, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunFolder) -> "RunWorld":
        """Read it."""
        config = config_of(run)
        size = config.world.size or parse_layout(config.layout).world_size
        found, since = cls(generation=0, members=tuple(range(size)), layout=config.layout, nodes=(0,) * size), 0.0
        hosts: dict[int, str] = {}
        attempt = 0
        for event in Tail(run.events).new():
            if event["kind"] == "agent_started":
                seats, nodes, since = _seats(event), event["nodes"], event["time"]
                hosts, attempt = (hosts if event.get("attempt") == attempt else {}), event.get("attempt", 0)
                hosts[event.get("node", 0)] = event.get("host", "")
                found = replace(
                    found,
                    generation=0,
                    members=tuple(range(len(seats))),
                    ranks_per_node=max(Counter(seats).values(), default=1) if nodes > 1 else None,
                    nodes=seats,
                    lent="",
                    parked=None,
                    ready=None,
                )
            elif event["kind"] == "lent":
                found = replace(found, lent=event["places"])
            elif event["kind"] == "parking":
                found = replace(found, parked=event["step"] if event["parked"] else None)
            elif event["kind"] == "ready":
                held = (event["layout"], max(event["held_bytes"], default=0))
                found = replace(found, ready=held if event["layout"] else None)
            elif event["kind"] == "host_joined":
                hosts[event["node"]] = event["host"]
            elif event["kind"] == "host_left":
                hosts.pop(event["node"], None)
            elif event["kind"] == "crossing" and event["stage"] == "done":
                members, nodes, since = tuple(event["members"]), tuple(event["nodes"]), event["time"]
                found = replace(found, generation=event["world"], members=members, nodes=nodes, layout=event["layout"])
                found = replace(found, ready=None)
        found = replace(found, hosts=hosts)
        last = Progress.of(run).last
        said = last["layout"] if last and last["time"] > since else found.layout
        return replace(found, layout=said) if parse_layout(said).world_size == found.size else found

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.members)

    def on(self, nodes: Collection[int]) -> list[int]:
        """The ranks on some nodes."""
        return [rank for rank, node in enumerate(self.nodes) if node in nodes]

    @property
    def text(self) -> str:
        """For people: members are named where they are not the ranks themselves."""
        who = "" if self.members == tuple(range(self.size)) else f": members {', '.join(map(str, self.members))}"
        away = f"; lent: {self.lent}" if self.lent else ""
        away += "" if self.parked is None else f"; parked in host memory before step {self.parked}"
        away += f"; {self.ready[0]} is ready, {self.ready[1] / 1e6:,.1f} MB on a rank" if self.ready else ""
        return f"{self.size} rank{'s' if self.size != 1 else ''} in world {self.generation}{who}{away}"

    @property
    def record(self) -> dict[str, Any]:
        """For programs."""
        return {"generation": self.generation, "size": self.size, "members": list(self.members)}


def _seats(event: Mapping[str, Any]) -> tuple[int, ...]:
    """The node of each rank of a first world; before that was told, every node had equally many."""
    each = max(1, event["world_size"] // max(1, event["nodes"]))
    return tuple(event.get("seats") or (rank // each for rank in range(event["world_size"])))


def config_of(run: RunFolder) -> RunConfig:
    """The run's resolved configuration.

    Raises:
        ConfigError: its ``config.toml`` was damaged, or is of another version.
    """
    return load_own(run.path).config


def switch_folders(run: RunFolder) -> tuple[Path, ...]:
    """The folders of a run's switches, by number; none where something is not there."""
    found = (path for path in run.switches.glob("*") if path.is_dir())
    return tuple(sorted(found, key=lambda path: (len(path.name), path.name)))  # 999 comes before 1000


def certificates(run: RunFolder) -> tuple[dict[str, Any], ...]:
    """The certificates of a run as they stand, in the order of its switches; those that do not hold are left out."""
    found = (_record(folder / "certificate.json") for folder in switch_folders(run))
    return tuple(record for record in found if not check_certificate(record))


def _record(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ObjectError):
        return {}


def certificate(run: RunFolder, number: int) -> dict[str, Any]:
    """One certificate; empty where it is not there, or not whole."""
    return next((one for one in certificates(run) if one["switch"] == number), {})


def certificate_for(run: RunFolder, request: str) -> dict[str, Any]:
    """The certificate of the switch that a request brought about; empty where none did."""
    return next((one for one in certificates(run) if one["cause"]["request_id"] == request), {})
