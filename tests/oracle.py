"""What training means, in plain torch on one process. Imports nothing of ours.

Weights go by Hugging Face name without ``model.``; a batch is a list of micro-batches (samples, inputs, targets).
"""

import hashlib
import math
from functools import partial

import torch
from tests import oracle_experts, oracle_optimizers
from torch.nn import functional as F  # noqa: N812 - the name that torch's own pages use


def mix(z):
    z = (z ^ z >> 16) * 0x7FEB352D & 0xFFFFFFFF
    return (z := (z ^ z >> 15) * 0x846CA68B & 0xFFFFFFFF) ^ z >> 16


def dropout(x, p, run, place, samples):
    key = int.from_bytes(hashlib.blake2b(f"{run}/{place}".encode(), digest_size=8).digest(), "little")
    rows = mix(mix(samples[:, None] ^ key & 0xFFFFFFFF) ^ torch.arange(x.shape[1]) ^ key >> 32)
    words = mix(rows[..., None] ^ mix(torch.arange(x.shape[2]) + 0x9E3779B9 & 0xFFFFFFFF))
    return torch.where(words ^ 0x80000000 >= int(p * 2**32), x * (1 / (1 - p)), 0) if p else x


def attention(q, k, v, p, run, place, samples):
    if not p:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    key = int.from_bytes(hashlib.blake2b(f"{run}/{place}".encode(), digest_size=8).digest(), "little")
    tokens = torch.arange(q.shape[2])
    rows = mix(mix(samples[:, None] ^ key & 0xFFFFFFFF) ^ torch.arange(q.shape[1]) ^ key >> 32)
    words = mix(mix(rows[..., None] ^ tokens)[..., None] ^ mix(tokens + 0x9E3779B9 & 0xFFFFFFFF))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(tokens > tokens[:, None], -math.inf)
    kept = torch.where(words ^ 0x80000000 >= int(p * 2**32), scores.softmax(-1) * (1 / (1 - p)), 0)
    return (kept @ v).transpose(1, 2).flatten(2)


def rotate(x, theta):
    rates = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = (torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rates).repeat(1, 2)[:, None]
    a, b = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat((-b, a), dim=-1) * angles.sin().to(x.dtype)


def logits(w, shape, samples, tokens, run, beside=None):
    def norm(x, name):  # queries and keys have theirs only in some models; with a bias it is a layer norm
        weight, bias, dims = w.get(name + ".weight"), w.get(name + ".bias"), x.shape[-1:]
        if bias is None:
            return x if weight is None else F.rms_norm(x, dims, weight, shape.norm_eps)
        return F.layer_norm(x, dims, weight, bias, shape.norm_eps)

    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    places = w.get("embed_positions.weight")  # learned ones, in place of rotation
    x = F.embedding(tokens, w["embed_tokens.weight"]) + (0 if places is None else places[: tokens.shape[1]])
    x = dropout(x, shape.dropout, run, "embed_tokens", samples)
    for layer in (f"layers.{i}." for i in range(shape.num_hidden_layers)):
        y, at = norm(x, layer + "input_layernorm"), layer + "self_attn."
        if shape.latent:
            y = oracle_experts.latent(w, shape.latent, at, y, partial(rotate, theta=shape.rope_theta))
        else:
            q, k, v = (linear(y, f"{at}{n}_proj").unflatten(-1, (-1, shape.head_dim)) for n in "qkv")
            q, k = (norm(t, f"{at}{n}_norm") for t, n in ((q, "q"), (k, "k")))
            q, k = (rotate(t, shape.rope_theta) if places is None else t for t in (q, k))
            q, k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2).transpose(1, 2) for t in (q, k, v))
            y = attention(q, k, v, shape.attention_dropout, run, at + "probabilities", samples)
        x = x + dropout(linear(y, at + "o_proj"), shape.dropout, run, at[:-1], samples)
        y, at = norm(x, layer + "post_attention_layernorm"), layer + "mlp."
        if at + "gate.weight" in w:
            y = oracle_experts.mixture(w, shape.experts, at, y, [] if beside is None else beside)
        else:
            gated = at + "gate_proj.weight" in w
            up = linear(y, at + "up_proj")
            y = linear(
                F.silu(linear(y, at + "gate_proj")) * up if gated else F.gelu(up, approximate="tanh"), at + "down_proj"
            )
        x = x + dropout(y, shape.dropout, run, at[:-1], samples)
    return F.linear(norm(x, "norm"), w["embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"])


def total(parts, tree):
    """Sum of lists of tensors: left to right, or as a binary counter (equal sizes first, the rest newest first)."""
    held = []  # (how many were added, their sum), oldest first
    for part in [*parts, None]:
        held += [(1, part)] if part else []
        while len(held) > 1 and (not part or not tree or held[-1][0] == held[-2][0]):
            (n, older), (m, newer) = held.pop(-2), held.pop()
            held.append((n + m, [a + b for a, b in zip(older, newer, strict=True)]))
    return held[0][1]


def differentiated(w, held, shape, batch, run, tree=True):
    """Of one batch: its loss, the gradients of the weights ``w``, and what routers counted. ``held`` is not trained."""
    tokens, parts, routed = sum(targets.numel() for _, _, targets in batch), [], []
    for samples, inputs, targets in batch:
        out = logits(w | held, shape, samples, inputs, run, beside := []).flatten(0, 1)
        loss = F.cross_entropy(out, targets.flatten(), reduction="sum") / tokens
        more = sum(balance for _, _, balance in beside) / tokens  # differentiated, and not told
        parts.append([loss.detach(), *torch.autograd.grad(loss + more, list(w.values()))])
        routed += [(name, counts) for name, counts, _ in beside]
    loss, *gradients = total(parts, tree)
    return loss, gradients, routed


def norm_of(gradients):
    """Of all gradients together."""
    return math.sqrt(torch.cat([g.double().square().reshape(len(g), -1).sum(1) for g in gradients]).sum())


def split(weights):
    """The weights that are trained, as leaves, and what is not; copies."""
    learnt = {n for n in weights if not n.endswith(("correction_bias", "tokens_per_expert"))}
    held = {n: v.clone() for n, v in weights.items() if n not in learnt}
    return {n: v.clone().requires_grad_() for n, v in weights.items() if n in learnt}, held


def train(
    weights, shape, batches, *, seed, rate, warmup, steps, decay=0.1, betas=(0.9, 0.95), clip=1.0, tree=True, by="adamw"
):
    """After each batch of steps 0, 1, ...: loss, weights and moments, live. The cosine reaches 0.1 at ``steps``."""
    w, held = split(weights)
    optimizers = oracle_optimizers.make(by, w, decay=decay, betas=betas)
    for step, batch in enumerate(batches):
        loss, gradients, routed = differentiated(w, held, shape, batch, f"{seed}/{step}", tree)
        norm = norm_of(gradients)
        for value, gradient in zip(w.values(), gradients, strict=True):
            value.grad = gradient * min(1.0, clip / (norm + 1e-6))
        cosine = (1 + math.cos(math.pi * min(1.0, max(0, step - warmup) / max(1, steps - warmup)))) / 2
        for one in optimizers:
            for group in one.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / max(1, warmup)) * (0.1 + 0.9 * cosine)
            one.step()
        oracle_experts.balance(held, routed)
        moments = {n: next(one.state[v] for one in optimizers if v in one.state) for n, v in w.items()}
        yield loss.item(), held | {n: v.detach() for n, v in w.items()}, moments
