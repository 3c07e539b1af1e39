"""The random streams of a process: what user code draws from Python's, numpy's and torch's generators.

Each stream belongs to a rank by its number. A step that is taken back has drawn nothing from them; a switch among the
same ranks leaves them where they stand; a checkpoint has those of all ranks. Going on on other numbers of ranks, a rank
takes up the streams of its number; those of ranks that are no more end there; and a rank that is new gets streams that
follow from rank 0's, from its own number and from the step: the same ones each time that checkpoint is taken up, and no
other rank's.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Streams:
    """Where the process-wide generators stand: Python's, numpy's, torch's on the host and on this rank's device."""

    python: Any
    numpy: Any
    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def read(cls, device: torch.device) -> "Streams":
        """Where they stand now."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        # The old face of numpy is the process-wide one, which data pipelines use.
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device)  # noqa: NPY002

    def restore(self, device: torch.device) -> None:
        """Put them back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.host)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)

    def of_new_rank(self, rank: int, step: int, device: torch.device) -> "Streams":
        """Those of a rank on ``device`` that was not there, by rank 0's, which these are."""
        stand = repr(self.python).encode() + repr(self.numpy[2:]).encode() + self.numpy[1].tobytes()
        stand += self.host.numpy().tobytes()
        python, numpy, host = (
            hashlib.blake2b(f"{rank}/{step}/{name}/".encode() + stand, digest_size=8).digest()
            for name in ("python", "numpy", "host")
        )
        old_face = np.random.RandomState(np.frombuffer(numpy, dtype=np.uint32))
        seed = int.from_bytes(host, "little")
        return Streams(
            random.Random(python).getstate(),
            old_face.get_state(),
            torch.Generator().manual_seed(seed).get_state(),
            torch.Generator("cuda").manual_seed(seed).get_state() if device.type == "cuda" else None,
        )

    def same(self, other: "Streams") -> bool:
        """Whether both stand at the same places."""
        mine, theirs = self.state(), other.state()
        numpy = all(map(_equal, mine["numpy"], theirs["numpy"]))
        return (
            mine["python"] == theirs["python"] and numpy and all(_equal(mine[k], theirs[k]) for k in ("host", "device"))
        )

    def state(self) -> dict[str, Any]:
        """The same in plain containers, numbers and tensors."""
        name, words, *rest = self.numpy
        numpy_state = [name, torch.from_numpy(words.astype(np.int64)), *rest]
        return {"python": self.python, "numpy": numpy_state, "host": self.host, "device": self.device}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Streams":
        """From what :meth:`state` gave."""
        version, words, gauss = state["python"]
        name, keys, *rest = state["numpy"]
        numpy_state = (name, keys.numpy().astype(np.uint32), *rest)
        return cls((version, tuple(words), gauss), numpy_state, state["host"], state["device"])


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
