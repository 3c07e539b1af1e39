"""What a save holds against the other ranks' copies before it writes one of them as all of them."""

import threading
from collections import defaultdict
from collections.abc import Mapping

import torch
import xxhash

from dynatrain.plan.plan import Granule
from dynatrain.space.tensor import Catalogue


class Replicas:
    """Hashes of the pieces of which other ranks have copies. Any thread may note.

    Args:
        catalogue: all tensors.
        peers: who holds the same, by granule: see :func:`dynatrain.plan.replicas.peers`.
    """

    def __init__(self, catalogue: Catalogue, peers: Mapping[Granule, str]) -> None:
        self._catalogue = catalogue
        self.peers = peers
        self._hashes: dict[Granule, str] = {}
        self._lock = threading.Lock()

    def note(self, granule: Granule, piece: torch.Tensor) -> None:
        """Hash a piece where others have it, too; on a device it is copied to be read."""
        if granule in self.peers:
            hashed = _hash(piece)
            with self._lock:
                self._hashes[granule] = hashed

    def told(self) -> dict[str, str]:
        """One hash for everything that the same ranks hold, by who they are."""
        found: dict[str, xxhash.xxh3_128] = defaultdict(xxhash.xxh3_128)
        for granule, who in self.peers.items():
            found[who].update(self._hashes[granule].encode())
        return {who: hashed.hexdigest() for who, hashed in found.items()}

    def each(self, groups: tuple[str, ...]) -> dict[str, dict[str, str]]:
        """The hash of each state that this rank holds with those groups of ranks."""
        return {
            who: {self._name(granule): hashed for granule, hashed in self._hashes.items() if self.peers[granule] == who}
            for who in groups
            if who in self.peers.values()
        }

    def _name(self, granule: Granule) -> str:
        tensor = self._catalogue[granule[0]]
        return f"{tensor.name} {tensor.states[granule[1]].name}"


def _hash(piece: torch.Tensor) -> str:
    whole = piece.detach().cpu().contiguous()
    return str(xxhash.xxh3_128_hexdigest(whole.reshape(-1).view(torch.uint8).numpy().data))
