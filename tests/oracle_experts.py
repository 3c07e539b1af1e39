"""Experts and latent attention in plain torch, token by token: what ``oracle`` has in the place of MLP and heads.

Imports nothing of ours. ``sizes`` is whatever has the published names as attributes; weights go by their full names.
"""

import torch
from torch.nn import functional as F  # noqa: N812 - the name that torch's own pages use

RATE = 1e-3
"""By which a bias moves after each step."""


def swiglu(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def choice(sizes, scores):
    """Numbers of a token's experts, ascending, from its scores for the choice."""
    size = sizes.num_experts // sizes.n_group
    groups = [range(g * size, g * size + size) for g in range(sizes.n_group)]
    if sizes.n_group > 1:
        best = sorted(groups, key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:2]))
        groups = best[: sizes.topk_group]
    return sorted(sorted((e for group in groups for e in group), key=lambda e: -scores[e])[: sizes.num_experts_per_tok])


def mixture(w, sizes, at, x, beside):
    """The block's output for x [B, T, H]; to ``beside`` go (name, counts, summed balance loss of the tokens)."""
    logits = F.linear(x, w[at + "gate.weight"])
    scores = logits.sigmoid() if sizes.gate == "sigmoid" else logits.softmax(-1)
    bias = w.get(at + "gate.e_score_correction_bias", torch.zeros(sizes.num_experts))
    out, loss, everywhere = [], 0, torch.zeros(sizes.num_experts, dtype=torch.int64)
    for sequence, given in zip(x, scores, strict=True):
        counts, rows = torch.zeros(sizes.num_experts, dtype=torch.int64), []
        for token, score in zip(sequence, given, strict=True):
            chosen = choice(sizes, (score + bias).tolist())
            counts[chosen] += 1
            total = sum(score[e] for e in chosen) + 1e-20 if sizes.norm_topk_prob else 1
            rows.append(
                sum(
                    swiglu(token, *(w[f"{at}experts.{n}_proj"][e] for n in ("gate", "up", "down")))
                    * (score[e] / total * sizes.routed_scaling_factor)
                    for e in chosen
                )
            )
        out.append(torch.stack(rows))
        load = counts.double() * sizes.num_experts / (sizes.num_experts_per_tok * len(sequence))
        mean_share = (given / given.sum(-1, keepdim=True)).mean(0)
        loss = loss + len(sequence) * sizes.router_aux_loss_coef * (load * mean_share).sum()
        everywhere += counts
    beside.append((at + "gate.e_score_correction_bias", everywhere, loss))
    out = torch.stack(out)
    if sizes.n_shared_experts:
        out = out + swiglu(x, *(w[f"{at}shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")))
    return out


def latent(w, sizes, at, x, rotate):
    """Attention's output for x [B, T, H], before the last projection: [B, T, heads x v]."""

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[f"{at}{name}.weight"], 1e-6)

    n, r, v = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    q = F.linear(norm(F.linear(x, w[at + "q_a_proj.weight"]), "q_a_layernorm"), w[at + "q_b_proj.weight"])
    both = F.linear(x, w[at + "kv_a_proj_with_mqa.weight"])
    kv = F.linear(norm(both[..., :-r], "kv_a_layernorm"), w[at + "kv_b_proj.weight"]).unflatten(-1, (-1, n + v))
    k_turned = rotate(torch.cat((both[..., -r::2], both[..., -r + 1 :: 2]), -1)[:, :, None])
    mixed = []
    for head, one in enumerate(q.unflatten(-1, (-1, n + r)).unbind(2)):
        turned = rotate(torch.cat((one[..., n::2], one[..., n + 1 :: 2]), -1)[:, :, None])
        query = torch.cat((one[..., :n], turned[:, :, 0]), -1)
        key = torch.cat((kv[:, :, head, :n], k_turned[:, :, 0]), -1)
        scores = query @ key.transpose(1, 2) / (n + r) ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ kv[:, :, head, n:])
    return torch.cat(mixed, -1)


@torch.no_grad()
def balance(w, routed):
    """Move every bias against the load of the step: ``routed`` has (name, counts) of each layer and micro-batch."""
    for name in {name for name, _ in routed} & w.keys():
        counts = sum(counts for of, counts in routed if of == name)
        w[name] -= RATE * (counts - counts.double().mean()).sign()
