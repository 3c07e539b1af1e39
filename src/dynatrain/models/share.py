"""Which tokens of each sequence a rank holds, under context parallelism and sequence parallelism.

Context parallelism cuts a sequence of T tokens into 2n chunks for n ranks; rank i holds chunks i and 2n-1-i. A causal
mask gives chunk c work in proportion to c + 1/2, so every rank has the same (as in "The Llama 3 Herd of Models",
arXiv 2407.21783, section 3.3.2). Sequence parallelism cuts what such a rank holds once more, into ranges, and between
layers only: attention sees all tokens of the rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """One rank's share of the tokens of each sequence; by default all of them.

    Attributes:
        parts: ranks that share a sequence in attention (context parallelism).
        part: number of this one among them.
        slices: ranks that cut the residual stream of a part (sequence parallelism).
        slice: number of this one among them.
    """

    parts: int = 1
    part: int = 0
    slices: int = 1
    slice: int = 0

    def chunks(self, part: int) -> tuple[int, int]:
        """The two chunks, of ``2 * parts``, that a part holds, ascending."""
        return part, 2 * self.parts - 1 - part

    def attended(self, tokens: int, part: int | None = None, device: torch.device | None = None) -> Tensor:
        """Numbers of the tokens that a part attends from, ascending: int64 [tokens / parts].

        Args:
            tokens: of the whole sequence.
            part: whose; by default this rank's.
            device: of the result.

        Raises:
            ValueError: ``tokens`` cannot be cut into chunks of one size.
        """
        if self.parts == 1:
            return torch.arange(tokens, device=device)
        size, rest = divmod(tokens, 2 * self.parts)
        if rest or not size:
            near = sorted({2 * self.parts * max(size, 1), 2 * self.parts * (size + 1)})
            raise ValueError(
                f"a sequence has {tokens} tokens; {self.parts} context parallel ranks cut it into {2 * self.parts} "
                f"chunks of one size; nearest: {' or '.join(map(str, near))}"
            )
        chunks = self.chunks(self.part if part is None else part)
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in chunks])

    def resident(self, local: int, device: torch.device | None = None) -> Tensor:
        """Numbers of the tokens in this rank's residual stream, int64 [local], where it holds ``local`` of them."""
        attended = self.attended(local * self.slices * self.parts, device=device)
        return attended[self.slice * local : (self.slice + 1) * local]

    def of(self, x: Tensor) -> Tensor:
        """This rank's part [B, T / parts, ...] of what belongs to all tokens [B, T, ...]: inputs, targets."""
        return x if self.parts == 1 else x[:, self.attended(x.shape[1], device=x.device)]


def positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Where tokens stand in their document.

    Args:
        tokens: numbers within the sequence, int64 [t].
        documents: int64 [B, T], for every token of the whole sequence the number of its document's first token; None
            where a sequence is one document.

    Returns:
        int64 [t], or [B, t] with documents.
    """
    return tokens if documents is None else tokens - documents[:, tokens]
