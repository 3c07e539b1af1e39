"""Dropout whose mask is a function of logical place, not of a generator's history.

Whether one element is dropped depends on (seed, step, place, sample, token, feature) alone. There is no state to
save, to move or to restore: any rank recomputes the mask of exactly the elements that it holds, so that tensor,
sequence, data and pipeline parallel runs drop the same elements, and a recomputed forward drops them again.

The formula is the specification (the tests' oracle states it a second time), all in unsigned 32-bit arithmetic::

    mix(z):   z ^= z >> 16;  z *= 0x7FEB352D;  z ^= z >> 15;  z *= 0x846CA68B;  z ^= z >> 16
    low, high = the two words of blake2b("seed/step/place", 8 bytes), little endian
    row       = mix(mix(sample ^ low) ^ token ^ high)
    word      = mix(row ^ mix(feature + 0x9E3779B9))
              of a probability of attention, with its query and key as token and feature:
              mix(mix(mix(sample ^ low) ^ head ^ high) ^ query)
    kept      where  word ^ 0x80000000  >=  floor(p * 2**32);  kept elements are multiplied by 1 / (1 - p)
"""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dynatrain.models.share import TokenShare

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_GOLDEN = 0x9E3779B9
_CPU_BLOCK = 1 << 14
"""Elements hashed at once on a CPU: what stays in its cache."""


@dataclass(slots=True, kw_only=True)
class KeyedStream:
    """Where the modules of one pipeline part stand in the run. Mutable: the loop writes it, the modules read it.

    Attributes:
        seed: of the run.
        step: the step being computed; the loop sets it before each step.
        share: which tokens of each sequence this rank holds.
        token_weight: by how much one token's loss counts in what is differentiated: 1 / tokens of the global batch.
        head_part: this rank's number among those that have a part of each layer's heads each.
        counting: whether routers count what they see: not while a part is run to learn the shapes of its outputs.
    """

    seed: int
    step: int = 0
    share: TokenShare = field(default_factory=TokenShare)
    token_weight: float = 1.0
    head_part: int = 0
    counting: bool = True


class KeyedDropout(nn.Module):
    """Dropout of a residual stream ``[samples, tokens, features]``; the identity in eval mode and where ``p`` is 0.

    Args:
        p: share of elements that become zero, in [0, 1).
        place: logical place, unique in the model and equal in every layout (``layers.3.mlp``).
        stream: shared by all modules of the part.

    Raises:
        ValueError: ``p`` outside [0, 1).
    """

    def __init__(self, p: float, place: str, stream: KeyedStream) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout is {p}; it is the share of elements dropped, at least 0 and below 1")
        self.p = p
        self.place = place
        self.stream = stream

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        """Drop elements of ``x`` [B, T, H], which holds this rank's tokens of ``samples`` [B] (global)."""
        if self.p == 0 or not self.training:
            return x
        kept = keep_mask(
            self.stream,
            self.place,
            self.p,
            samples=samples,
            tokens=self.stream.share.resident(x.shape[1], x.device),
            features=torch.arange(x.shape[2], device=x.device),
        )
        return torch.where(kept, x * (1 / (1 - self.p)), 0)

    def extra_repr(self) -> str:
        """Rate and place, for ``print(model)``."""
        return f"p={self.p}, place={self.place!r}"


def keep_mask(
    stream: KeyedStream, place: str, p: float, *, samples: Tensor, tokens: Tensor, features: Tensor
) -> Tensor:
    """Which elements stay, bool ``[samples, tokens, features]``, for any global numbers (int64, below 2^32)."""
    low, high = place_key(stream, place)
    rows = _mix(_mix(samples[:, None] ^ low) ^ tokens ^ high).flatten()
    columns = _mix(features + _GOLDEN & 0xFFFFFFFF)
    return _kept(_int32(rows), _int32(columns), int(p * 2**32) - 2**31).view(len(samples), len(tokens), len(features))


def keep_pairs(
    key: tuple[int, int], p: float, *, samples: Tensor, heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """Which probabilities of attention stay, bool ``[samples, heads, queries, keys]``, for any global numbers.

    Args:
        key: of a place, as :func:`place_key` gives it.
        p: share that is dropped.
        samples: int64, as of :func:`keep_mask`; so are the others.
        heads: of queries.
        queries: tokens.
        keys: tokens.
    """
    low, high = key
    rows = _mix(_mix(_mix(samples[:, None] ^ low) ^ heads ^ high)[..., None] ^ queries)
    columns = _mix(keys + _GOLDEN & 0xFFFFFFFF)
    return _kept(_int32(rows.flatten()), _int32(columns), int(p * 2**32) - 2**31).view(*rows.shape, len(keys))


def place_key(stream: KeyedStream, place: str) -> tuple[int, int]:
    """The two unsigned 32-bit key words of a place at the stream's step."""
    text = f"{stream.seed}/{stream.step}/{place}".encode()
    word = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return word & 0xFFFFFFFF, word >> 32


def _mix(z: Tensor) -> Tensor:
    """Mix of unsigned 32-bit words kept in int64: the product wraps mod 2^64, which leaves its low half right."""
    z = (z ^ z >> 16) * _FIRST & 0xFFFFFFFF
    z = (z ^ z >> 15) * _SECOND & 0xFFFFFFFF
    return z ^ z >> 16


def _int32(words: Tensor) -> Tensor:
    """Unsigned words held in int64 as the int32 of equal bits."""
    return (words - ((words >> 31) << 32)).int()


def _kept(rows: Tensor, columns: Tensor, floor: int) -> Tensor:
    """``mix(row ^ column) >= floor`` as signed words, for all pairs, in place and blockwise: it runs once per element.

    Comparing signed words is comparing unsigned ones whose top bit is flipped, hence the flip in the formula.
    """
    kept = torch.empty(len(rows), len(columns), dtype=torch.bool, device=rows.device)
    per_block = max(1, _CPU_BLOCK // max(1, len(columns))) if rows.device.type == "cpu" else max(1, len(rows))
    second = _SECOND - 2**32
    for start in range(0, len(rows), per_block):
        block = slice(start, start + per_block)
        z = rows[block, None] ^ columns
        shifted = torch.empty_like(z)
        for shift, factor in ((16, _FIRST), (15, second), (16, 1)):
            torch.bitwise_right_shift(z, shift, out=shifted)
            shifted &= (1 << (32 - shift)) - 1  # the shift of a signed word repeats its sign
            z ^= shifted
            z *= factor
        torch.ge(z, floor, out=kept[block])
    return kept
