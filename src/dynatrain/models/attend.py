"""How attention is done: what a decoder's attention asks for, and the way of one process that holds all tokens.

An :class:`Attend` mixes values; it has no parameters, so one object serves all layers of a part. Under context
parallelism (:mod:`dynatrain.models.context`) a rank calls it with its own tokens and gets theirs mixed.

Legend of shapes: B samples, T tokens of the whole sequence, t those of this rank, N query heads, K key/value heads
(K divides N; heads n * K // N belong together), D size of a query or key, E size of a value.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dynatrain.models.dropped import Dropped, attend_dropped


class Attend(Protocol):
    """A way of causal attention, scaled by D ** -0.5."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropped: Dropped | None = None, /
    ) -> Tensor:
        """The mixed values [B, t, N, E].

        Args:
            q: [B, t, N, D].
            k: [B, t, K, D].
            v: [B, t, K, E].
            documents: int64 [B, T], for every token of the whole sequence the number of its document's first token; no
                token sees another document. None where a sequence is one document.
            dropped: which probabilities are dropped; None where none are.
        """


def attend_whole(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropped: Dropped | None = None) -> Tensor:
    """The :class:`Attend` of a process that holds all tokens."""
    if documents is None and dropped is None:
        return attend_where(q, k, v, None)
    tokens = torch.arange(q.shape[1], device=q.device)
    seen = visible(tokens, tokens, documents)
    return attend_where(q, k, v, seen) if dropped is None else attend_dropped(q, k, v, seen, dropped, tokens, tokens)


def visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Which keys a query sees: those of its document that do not stand behind it.

    Args:
        queries: numbers of tokens, int64 [q].
        keys: numbers of tokens, int64 [k].
        documents: as of :class:`Attend`.

    Returns:
        bool [q, k], or [B, 1, q, k] with documents.
    """
    ahead = keys <= queries[:, None]
    return ahead if documents is None else (ahead & (keys >= documents[:, queries, None]))[:, None]


def attend_where(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attention from some tokens to some, [B, q, N, D] and [B, k, K, D or E] -> [B, q, N, E].

    Nothing is dropped here: the masks of torch's own attention dropout depend on how the work is cut.

    Args:
        q: queries.
        k: keys.
        v: values.
        seen: as of :func:`visible`; every query sees a key. None where query i sees keys 0 to i.
    """
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        is_causal=seen is None,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2)
