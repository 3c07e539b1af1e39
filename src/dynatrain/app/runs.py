"""Reading a run's folder: its configuration, its progress, its switches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynatrain.config.own import load_own
from dynatrain.config.run import RunConfig
from dynatrain.judge.certificate import check_certificate
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
