"""What is said at the door of a run, under which seal, and why somebody does not come in. Pure; no torch."""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Kind = Literal["claim", "answer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What an agent says that wants in.

    Attributes:
        place: name of the place that it claims; of one name there is one agent.
        host: where it runs.
        pid: its process.
        devices: CUDA devices that it has.
        ranks: by how many the run is to grow for it; 0 for a place that is kept for later.
        prints: fingerprints of what must be alike, by what they are of (``code``, ``config``, ``model``, ...).
    """

    place: str
    host: str
    pid: int
    devices: int
    ranks: int
    prints: Mapping[str, str]

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What an agent is told that comes in.

    Attributes:
        node: its number.
        nodes: agents that there were at the start.
        nonce: names the run in the store.
        world_size: ranks of the first world.
        each: ranks of a node in that world, which plans count nodes by.
        world: members of the present world, by rank.
        generation: of that world.
        summons: the last change of members, as text; empty before the first.
        device: ``cpu`` or ``cuda``.
        backend: ``gloo`` or ``nccl``.
        attempt: number of the run's agent.
    """

    node: int
    nodes: int
    nonce: str
    world_size: int
    each: int
    world: tuple[int, ...]
    generation: int
    summons: str
    device: str
    backend: str
    attempt: int

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(text)
        return cls(**{**found, "world": tuple(found["world"])})


def refusal(claim: Claim, *, prints: Mapping[str, str], taken: Mapping[str, str], device: str) -> str:
    """Why an agent cannot come in, everything at once; empty where it can. Pure.

    Args:
        claim: its claim.
        prints: the run's own.
        taken: who has which place, in words.
        device: of the run.
    """
    return "; ".join(_problems(claim, prints, taken, device))


def _problems(claim: Claim, prints: Mapping[str, str], taken: Mapping[str, str], device: str) -> Iterator[str]:
    if claim.place in taken:
        yield f"the place {claim.place!r} is taken by {taken[claim.place]}; nearest: --place {claim.place}-2"
    for what, ours in prints.items():
        theirs = claim.prints.get(what, "none")
        if theirs != ours:
            yield f"another {what}: {theirs}, the run has {ours}"
    if device == "cuda" and claim.devices < max(claim.ranks, 1):
        yield f"it has {claim.devices} CUDA devices, the run needs one for each rank"


def sealed(secret: str, number: int, kind: Kind, body: str) -> str:
    """A message under the run's seal, which holds for this number alone."""
    return json.dumps({"body": body, "seal": _seal(secret, number, kind, body)})


def opened(secret: str, number: int, kind: Kind, text: str) -> str | None:
    """What stands in a message; None where it does not bear the run's seal."""
    try:
        found: Any = json.loads(text)
        body, seal = str(found["body"]), str(found["seal"])
    except (ValueError, KeyError, TypeError):
        return None
    return body if hmac.compare_digest(seal.encode(), _seal(secret, number, kind, body).encode()) else None


def _seal(secret: str, number: int, kind: Kind, body: str) -> str:
    return hmac.new(secret.encode(), f"{kind} {number} {body}".encode(), hashlib.sha256).hexdigest()
