"""Optimizers in plain torch on whole tensors, after their papers: what ``oracle`` trains with. Imports nothing of ours.

The states have the names that the papers' quantities have in every layout, so that both can be compared by name.
"""

import torch

MOMENTUM = 0.9


def make(name, weights, *, decay, betas):
    """The optimizers of ``{name: weight}``: matrices decay by ``decay``, vectors do not. Rates are the caller's."""
    if name == "muon":
        hidden = {n: v for n, v in weights.items() if v.ndim > 1 and not n.startswith(("embed_", "lm_head"))}
        rest = {n: v for n, v in weights.items() if n not in hidden}
        return [Plain(groups(hidden, decay)[:1], muon), *make("adamw", rest, decay=decay, betas=betas)]
    match name:
        case "adamw":
            return [torch.optim.AdamW(groups(weights, decay), betas=betas)]
        case "sgd":
            return [torch.optim.SGD(groups(weights, decay), momentum=MOMENTUM)]
        case "adafactor":
            return [Plain(groups(weights, decay), adafactor)]
    raise ValueError(f"{name}: the oracle has it not")


def groups(weights, decay):
    return [
        {"params": [v for v in weights.values() if (v.ndim > 1) == m], "weight_decay": decay * m} for m in (True, False)
    ]


class Plain(torch.optim.Optimizer):
    """``update(value, gradient, state)`` gives what to subtract at a rate of 1; decay is decoupled."""

    def __init__(self, params, update):
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for value in group["params"]:
                by = self.update(value, value.grad, self.state[value])
                value.copy_(value * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * by)


def towards(state, name, value, weight):
    """The running mean ``name``, which begins at zero, after ``value`` came with ``weight``."""
    state[name] = state.get(name, torch.zeros_like(value)) * (1 - weight) + value * weight
    return state[name]


def adafactor(_value, gradient, state):
    """Shazeer and Stern 2018, algorithms 4 and 5, with an absolute rate; a stack is as many matrices."""
    state["step"] = state.get("step", torch.zeros(())) + 1
    weight, squares = float(state["step"]) ** -0.8, gradient**2 + 1e-30
    if gradient.ndim < 2:
        second = towards(state, "exp_avg_sq", squares, weight)
    else:
        rows = towards(state, "exp_avg_sq_row", squares.mean(-1), weight)
        columns = towards(state, "exp_avg_sq_col", squares.mean(-2), weight)
        second = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
    update = gradient / second.sqrt()
    return update / max(1.0, update.square().mean().sqrt().item())


def muon(_value, gradient, state):
    """Jordan et al. 2024, at the scale of Liu et al. 2025; a stack is as many matrices."""
    mean = towards(state, "momentum_buffer", gradient, 1 - MOMENTUM)
    ahead = MOMENTUM * mean + (1 - MOMENTUM) * gradient
    flat = ahead.reshape(-1, *ahead.shape[-2:])
    scale = 0.2 * max(ahead.shape[-2:]) ** 0.5
    return scale * torch.stack([orthogonal(matrix) for matrix in flat]).view_as(ahead)


def orthogonal(matrix):
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / max(matrix.square().sum().sqrt().item(), 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x
