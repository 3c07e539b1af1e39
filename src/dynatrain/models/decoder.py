"""One pipeline part of a decoder, under Hugging Face parameter names: in today's form, or in GPT-2's.

A part holds a range of layers under their *global* numbers, the embedding if it is the first part, final norm and head
if it is the last. It is plain torch and knows no layout: tensor parallelism (``ColwiseParallel`` on q, k, v, gate, up
and the head, ``RowwiseParallel`` on o, down), sequence parallelism of the norms, ``fully_shard`` and pipelining are
applied to it from outside. Head counts come from the local weights, hence a rank that holds a part of the heads runs
the same code. GPT-2's form has the same modules under the same names, less the gate and the rotation, plus biases and
positions. Experts and latent attention stand in their places under the same names.

Legend of shapes: B samples, T tokens, H hidden size, N local heads, D head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynatrain.models.attend import Attend, attend_whole
from dynatrain.models.dropped import AttentionDropout
from dynatrain.models.experts import MixtureOfExperts
from dynatrain.models.keyed import KeyedDropout, KeyedStream
from dynatrain.models.latent import LatentAttention
from dynatrain.models.names import strip_wrappers
from dynatrain.models.share import TokenShare, positions
from dynatrain.space.decoder import GPT2, DecoderShape


class Rotary:
    """Turns queries and keys by the angle of their position.

    The tables are computed from integer positions in fp64 and never pass a module boundary as an argument, where mixed
    precision would cast them; the product is formed in fp32 at least, and rounded to the input's dtype last. No buffer
    either: nothing to fill after a build on meta.
    """

    def __init__(self, head_dim: int, theta: float, share: TokenShare) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._share = share
        self._kept: tuple[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] | None = None

    def __call__(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Turn each pair ``(x[i], x[i + D/2])`` of a token by the angles of its position, as of ``positions``.

        Args:
            x: [B, T, N, D], the tokens that this rank attends from.
            documents: as of ``Attend``.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        tokens = x.shape[1] * self._share.parts
        cos, sin = self._tables(tokens, x.device, wide)
        if self._share.parts > 1 or documents is not None:
            places = positions(self._share.attended(tokens, device=x.device), documents)
            cos, sin = cos[places], sin[places]
        one, other = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-other, one), dim=-1) * sin).to(x.dtype)

    def _tables(self, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D]; the last ones asked for are kept, since every layer asks for the same."""
        if torch.compiler.is_compiling():
            return self._made(tokens, device, dtype)
        wanted = (tokens, device, dtype)
        if self._kept is None or self._kept[0] != wanted:
            with torch.inference_mode(mode=False):  # kept tables outlive a validation pass and must allow autograd
                self._kept = (wanted, self._made(tokens, device, dtype))
        return self._kept[1]

    def _made(self, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        even = torch.arange(0, self._head_dim, 2, device=device, dtype=torch.float64)
        rates = self._theta ** (-even / self._head_dim)
        positions = torch.arange(tokens, device=device, dtype=torch.float64)
        angles = (positions[:, None] * rates).repeat(1, 2)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _norm(shape: DecoderShape, width: int) -> nn.Module:
    """A norm over the last dim, as the family has it."""
    return (nn.LayerNorm if shape.family == GPT2 else nn.RMSNorm)(width, eps=shape.norm_eps)


def _linear(shape: DecoderShape, inputs: int, outputs: int) -> nn.Linear:
    """A projection inside a block, with a bias where the family has them."""
    return nn.Linear(inputs, outputs, bias=shape.family == GPT2)


class Attention(nn.Module):
    """Causal grouped-query attention, with optional norms of queries and keys per head."""

    def __init__(self, shape: DecoderShape, rotary: Rotary | None, attend: Attend, drop: AttentionDropout) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.rotary = rotary
        self.attend = attend
        self.drop = drop
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = _linear(shape, shape.hidden_size, queries)
        self.k_proj = _linear(shape, shape.hidden_size, keys)
        self.v_proj = _linear(shape, shape.hidden_size, keys)
        self.o_proj = _linear(shape, queries, shape.hidden_size)
        if shape.qk_norm:
            self.q_norm: nn.Module = _norm(shape, shape.head_dim)
            self.k_norm: nn.Module = _norm(shape, shape.head_dim)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, samples: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T, H] -> [B, T, H], all tokens that this rank attends from; as of ``DecoderLayer``."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, documents), self.rotary(k, documents)
        return self.o_proj(self.attend(q, k, v, documents, self.drop(samples, q.shape[2])).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GeluFeedForward(nn.Module):
    """GELU by its tanh formula between two projections: GPT-2's."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.up_proj = _linear(shape, shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape, shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        return self.down_proj(functional.gelu(self.up_proj(x), approximate="tanh"))


def _attention(shape: DecoderShape, rotary: Rotary | None, attend: Attend, drop: AttentionDropout) -> nn.Module:
    return (Attention if shape.latent is None else LatentAttention)(shape, rotary, attend, drop)


def _mlp(shape: DecoderShape, layer: int, streams: KeyedStream) -> nn.Module:
    if shape.family == GPT2:
        return GeluFeedForward(shape)
    if not shape.has_experts(layer):
        return FeedForward(shape.hidden_size, shape.intermediate_size)
    width = shape.experts.shared_width
    return MixtureOfExperts(shape, FeedForward(shape.hidden_size, width) if width else None, streams)


class DecoderLayer(nn.Module):
    """One transformer block; ``layer`` is its global number. Under sequence parallel x holds a range of tokens."""

    def __init__(
        self, shape: DecoderShape, layer: int, rotary: Rotary | None, streams: KeyedStream, attend: Attend
    ) -> None:
        super().__init__()
        self.input_layernorm = _norm(shape, shape.hidden_size)
        place = f"layers.{layer}.self_attn"
        drop = AttentionDropout(shape.attention_dropout, f"{place}.probabilities", streams)
        self.self_attn = _attention(shape, rotary, attend, drop)
        self.self_attn_dropout = KeyedDropout(shape.dropout, place, streams)
        self.post_attention_layernorm = _norm(shape, shape.hidden_size)
        self.mlp = _mlp(shape, layer, streams)
        self.mlp_dropout = KeyedDropout(shape.dropout, f"layers.{layer}.mlp", streams)

    def forward(self, x: Tensor, samples: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T, H] -> [B, T, H]; ``samples`` [B] are global sample numbers, ``documents`` as of ``Attend``."""
        mixed = self.self_attn(self.input_layernorm(x), samples=samples, documents=documents)
        x = x + self.self_attn_dropout(mixed, samples)
        y = self.post_attention_layernorm(x)
        y = self.mlp(y, samples) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(y)
        return x + self.mlp_dropout(y, samples)


class DecoderPart(nn.Module):
    """One pipeline part of a decoder.

    Args:
        shape: of the whole model.
        layers: global numbers of the layers that this part holds; may be empty.
        first: holds the embedding and takes tokens.
        last: holds final norm and head and returns logits.
        streams: what the part's dropout is keyed by, and which tokens it holds; the caller keeps it and moves it on.
        attend: how attention is done.

    Weights start as torch makes them; ``initial_box`` under :func:`canonical_name` gives the keyed ones.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: range,
        *,
        first: bool,
        last: bool,
        streams: KeyedStream,
        attend: Attend = attend_whole,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.streams = streams
        placed = shape.family == GPT2  # by a learned vector, else by rotation
        turned = shape.head_dim if shape.latent is None else shape.latent.qk_rope_head_dim
        rotary = None if placed else Rotary(turned, shape.rope_theta, streams.share)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if first else None
        self.embed_positions = (
            nn.Embedding(shape.max_position_embeddings, shape.hidden_size) if first and placed else None
        )
        self.embed_dropout = KeyedDropout(shape.dropout, "embed_tokens", streams) if first else None
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(shape, layer, rotary, streams, attend) for layer in layers}
        )
        self.norm = _norm(shape, shape.hidden_size) if last else None
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False) if last else None
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter where the model is tied and this part holds both.

        Whatever gives the modules new parameter objects one by one (``parallelize_module``, ``to_empty``,
        ``load_state_dict(assign=True)``) parts them without a word; call this afterwards.
        """
        if self.shape.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor, samples: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the part.

        Args:
            x: int64 tokens [B, T] on the first part, else the hidden state [B, T, H] of the part before; under context
                parallelism this rank's tokens.
            samples: int64 [B], global sample numbers: what dropout is keyed by.
            documents: int64 [B, T], for every token of the whole sequence the number of its document's first token;
                attention stays within a document, positions are counted from its first token. None where a sequence
                is one document.

        Returns:
            Logits [B, T, vocabulary] on the last part, else the hidden state.
        """
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
            if self.embed_positions is not None:
                # Under sequence parallel x holds a range of the tokens from here on.
                places = positions(self.streams.share.resident(x.shape[1], x.device), documents)
                x = x + self.embed_positions(places.view(-1, x.shape[1]))
            x = self.embed_dropout(x, samples)
        for layer in self.layers.values():
            x = layer(x, samples, documents)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def canonical_name(part: DecoderPart, fqn: str) -> str:
    """The logical tensor that the part's parameter ``fqn`` belongs to.

    Names of wrappers around modules fall away, in any nesting; the head of a tied model is its embedding.
    """
    name = strip_wrappers(part, fqn)
    return "embed_tokens.weight" if part.shape.tie_word_embeddings and name == "lm_head.weight" else name
