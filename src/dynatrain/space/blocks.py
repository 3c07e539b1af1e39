"""What may stand in a transformer block in place of plain attention and one MLP: sizes as values, and their tensors.

Legend of the dims: D hidden size, E experts, F width of one expert, H heads, Q and C the latents of queries and of
keys/values, n, r and v the parts of a head: without rotation, with it, and of its value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dynatrain.space.tensor import Cuts

ROWS: Cuts = (("tp", 0), ("fsdp", 0))
COLUMNS: Cuts = (("tp", 1), ("fsdp", 0))
SHARDED: Cuts = (("fsdp", 0),)
EXPERT_ROWS: Cuts = (("ep", 0), ("etp", 1), ("efsdp", 0))
EXPERT_COLUMNS: Cuts = (("ep", 0), ("etp", 2), ("efsdp", 0))
"""Experts are stacked in dim 0, where the index is the expert's global number."""

Parameters = Iterator[tuple[str, tuple[int, ...], Cuts]]
"""Name, shape and cuts of each parameter, in the order of construction."""

BIAS = ".e_score_correction_bias"
"""End of the name of a router's bias, which balances the load of its experts."""

COUNTERS = ".tokens_per_expert"
"""End of the name of a router's counters: what its experts were sent since the last step. No file has them."""

SOFTMAX, SIGMOID = GATES = ("softmax", "sigmoid")
"""How logits become scores: see :class:`Experts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP. Names are Hugging Face's; ``DecoderShape`` checks the values.

    Attributes:
        num_experts: routed experts of a layer.
        num_experts_per_tok: experts that each token is sent to.
        moe_intermediate_size: width of one expert.
        gate: ``softmax`` over the experts (Mixtral, Qwen3), or ``sigmoid`` of each with a bias that takes part in the
            choice alone and is moved after each step to balance the load (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
        norm_topk_prob: the weights of a token's experts are divided by their sum.
        routed_scaling_factor: the weights are multiplied by it, last.
        n_shared_experts: experts that every token passes as well; together one MLP of their summed width.
        first_k_dense_replace: so many layers, from the first, have a plain MLP.
        n_group: groups of equally many experts with neighbouring numbers.
        topk_group: groups that a token may choose from: those with the largest sum of their two best scores.
        router_aux_loss_coef: factor of the balance loss of each layer and sequence (``models.experts``); 0 for none.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    gate: str = SOFTMAX
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    router_aux_loss_coef: float = 0.0

    def problems(self) -> list[str]:
        """Every rule that is broken."""
        at_least = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "topk_group"), 1)
        at_least |= {"n_group": 1, "n_shared_experts": 0, "first_k_dense_replace": 0, "router_aux_loss_coef": 0}
        found = _too_small(self, at_least)
        if self.gate not in GATES:
            found.append(f"gate is {self.gate!r}; one of {', '.join(GATES)}")
        if not self.routed_scaling_factor > 0:
            found.append(f"routed_scaling_factor is {self.routed_scaling_factor}; above 0")
        return found or self._group_problems()

    def _group_problems(self) -> list[str]:
        size, rest = divmod(self.num_experts, self.n_group)
        if rest or (self.n_group > 1 and size < 2):
            rule = "groups are of equal size, and of two experts or more"
            return [f"n_group is {self.n_group} for {self.num_experts} experts; {rule}"]
        if self.topk_group > self.n_group:
            return [f"topk_group is {self.topk_group}; at most n_group, {self.n_group}"]
        if self.num_experts_per_tok > (choice := size * self.topk_group):
            return [f"num_experts_per_tok is {self.num_experts_per_tok}; at most the experts to choose from, {choice}"]
        return []

    @property
    def shared_width(self) -> int:
        """Width of the MLP that every token passes; 0 where there is none."""
        return self.n_shared_experts * self.moe_intermediate_size

    def parameters(self, hidden_size: int) -> Parameters:
        """Those of one layer, under ``mlp``."""
        E, F, D = self.num_experts, self.moe_intermediate_size, hidden_size  # noqa: N806  # the legend's names
        yield "gate.weight", (E, D), SHARDED
        yield "experts.gate_proj", (E, F, D), EXPERT_ROWS
        yield "experts.up_proj", (E, F, D), EXPERT_ROWS
        yield "experts.down_proj", (E, D, F), EXPERT_COLUMNS
        if self.n_shared_experts:
            for name, dims, cuts in gated_mlp(D, self.shared_width):
                yield f"shared_experts.{name}", dims, cuts

    def buffers(self, dtype: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of one layer's, under ``mlp``; ``dtype`` is that of the parameters."""
        if self.gate == SIGMOID:
            # Moved by small steps, which 16 bits would lose.
            yield f"gate{BIAS}", (self.num_experts,), "float64" if dtype == "float64" else "float32"
            yield f"gate{COUNTERS}", (self.num_experts,), "int64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1). Names are Hugging Face's.

    Queries, and keys with values, are made from narrow latents; a part of each key, turned by position, is shared by
    all heads. Pairs that are turned lie side by side.

    Attributes:
        q_lora_rank: width of the queries' latent.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim: elements of a query or key head that know no position.
        qk_rope_head_dim: elements of a query or key head that are turned; even.
        v_head_dim: elements of a value head.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def problems(self) -> list[str]:
        """Every rule that is broken."""
        found = _too_small(self, dict.fromkeys(self.__slots__, 1))
        if self.qk_rope_head_dim % 2:
            found.append(f"qk_rope_head_dim is {self.qk_rope_head_dim}; rotary embedding needs an even number")
        return found

    @property
    def head_dim(self) -> int:
        """Elements of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def parameters(self, hidden_size: int, num_heads: int) -> Parameters:
        """Those of one layer, under ``self_attn``: latents are copies on the ranks of tp, heads are cut by it."""
        D, Q, C = hidden_size, self.q_lora_rank, self.kv_lora_rank  # noqa: N806  # the legend's names
        n, r, v = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        yield "q_a_proj.weight", (Q, D), SHARDED
        yield "q_a_layernorm.weight", (Q,), SHARDED
        yield "q_b_proj.weight", (num_heads * (n + r), Q), ROWS
        yield "kv_a_proj_with_mqa.weight", (C + r, D), SHARDED
        yield "kv_a_layernorm.weight", (C,), SHARDED
        yield "kv_b_proj.weight", (num_heads * (n + v), C), ROWS
        yield "o_proj.weight", (D, num_heads * v), COLUMNS


def gated_mlp(hidden_size: int, width: int) -> Parameters:
    """SwiGLU's."""
    yield "gate_proj.weight", (width, hidden_size), ROWS
    yield "up_proj.weight", (width, hidden_size), ROWS
    yield "down_proj.weight", (hidden_size, width), COLUMNS


def _too_small(value: Any, at_least: dict[str, int]) -> list[str]:
    return [
        f"{name} is {getattr(value, name)}; at least {least}"
        for name, least in at_least.items()
        if getattr(value, name) < least
    ]
