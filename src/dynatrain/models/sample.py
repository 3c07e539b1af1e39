"""Continuing a text: one token after the other, each from the logits of all that stand before it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynatrain.models.decoder import DecoderPart


def continued(
    model: DecoderPart,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    end: int | None,
) -> list[int]:
    """What a model writes after ``prompt``: a function of these arguments.

    Every step computes all tokens anew, of the longest sequence that the model knows the last ones.

    Args:
        model: whole, and set to evaluate.
        prompt: at least one token.
        tokens: how many to write, at most.
        temperature: logits are divided by it before one is drawn; 0 takes the most likely token.
        top_k: draw from so many of the most likely tokens; 0 for all.
        seed: of the draws.
        end: the token that ends a text; None where there is none.

    Returns:
        The new tokens, ``end`` included where it came.
    """
    generator = torch.Generator().manual_seed(seed)
    seen, written = list(prompt), list[int]()
    sample = torch.zeros(1, dtype=torch.int64)
    while len(written) < tokens and (not written or written[-1] != end):
        window = torch.tensor([seen[-model.shape.max_position_embeddings :]])
        with torch.no_grad():
            logits = model(window, sample)[0, -1]
        written.append(_chosen(logits, temperature, top_k, generator))
        seen.append(written[-1])
    return written


def _chosen(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """The next token, from logits [vocabulary]."""
    if temperature == 0:
        return int(logits.argmax())
    likely, places = logits.double().topk(min(top_k or logits.numel(), logits.numel()))
    # Differences from the greatest: a temperature near 0 takes them to minus infinity, and not the greatest itself.
    drawn = torch.multinomial(((likely - likely.max()) / temperature).softmax(0), 1, generator=generator)
    return int(places[drawn])
