"""How the ``config.json`` of each architecture that is built describes a decoder: a table."""

from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How the ``config.json`` of one architecture describes a decoder.

    Attributes:
        name: its entry in ``architectures``.
        model_type: Hugging Face's short name.
        fixed: fields of a ``DecoderShape`` that the architecture itself decides.
        keys: field of a ``DecoderShape`` -> its key.
        required: fields that the file must give.
        defaults: fields where the file does not say: of the architecture's own configuration class.
        activation: key of the activation, and what may stand there.
        only: keys of which one value is built, which a written file says; another would give other tensors.
        also: another spelling of a key -> the key.
        said: what a written file says besides.
    """

    name: str
    model_type: str
    fixed: Config
    keys: dict[str, str]
    required: tuple[str, ...]
    defaults: Config
    activation: tuple[str, tuple[str, ...]]
    said: Config
    only: Config = field(default_factory=dict)
    also: dict[str, str] = field(default_factory=dict)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
HEADS = ("num_key_value_heads", "head_dim")
SIZES_OF_EXPERTS = tuple(f"experts.{name}" for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
SIZES_OF_LATENTS = tuple(
    f"latent.{name}" for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
)
_NO_SHARED: Config = {
    "experts.gate": "softmax",
    "experts.routed_scaling_factor": 1.0,
    "experts.n_shared_experts": 0,
    "experts.first_k_dense_replace": 0,
    "experts.n_group": 1,
    "experts.topk_group": 1,
}
_GIVEN_BY_DEEPSEEK = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
)
_DENSE: Config = {"family": "llama", "experts": None, "latent": None}
_LLAMA_KEYS = {
    **{field: field for field in (*SIZES, *HEADS, "tie_word_embeddings", "max_position_embeddings", "rope_theta")},
    "norm_eps": "rms_norm_eps",
    # Hugging Face has no residual dropout for these architectures; GPT-2's name for it is the known one.
    "dropout": "resid_pdrop",
    "attention_dropout": "attention_dropout",
}
_LLAMA_LIKE: Config = {
    "activation": ("hidden_act", ("silu",)),
    "said": {"attention_bias": False},
}
_LLAMA_DEFAULTS: Config = {
    "tie_word_embeddings": False,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}

ARCHITECTURES = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        fixed={**_DENSE, "qk_norm": False},
        required=SIZES,
        keys=_LLAMA_KEYS,
        defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 2048},
        **_LLAMA_LIKE,
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        fixed={**_DENSE, "qk_norm": True},
        required=(*SIZES, *HEADS),
        keys=_LLAMA_KEYS,
        defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 32768},
        **_LLAMA_LIKE,
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        fixed={"family": "llama", "qk_norm": True, "latent": None, **_NO_SHARED},
        required=(*SIZES, *HEADS, *SIZES_OF_EXPERTS),
        keys={
            **_LLAMA_KEYS,
            **{name: name.removeprefix("experts.") for name in SIZES_OF_EXPERTS},
            "experts.norm_topk_prob": "norm_topk_prob",
            "experts.router_aux_loss_coef": "router_aux_loss_coef",
        },
        defaults={
            **_LLAMA_DEFAULTS,
            "max_position_embeddings": 32768,
            "experts.norm_topk_prob": False,
            "experts.router_aux_loss_coef": 0.001,
        },
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        also={"num_local_experts": "num_experts"},
        **_LLAMA_LIKE,
    ),
    Architecture(
        name="MixtralForCausalLM",
        model_type="mixtral",
        fixed={"family": "llama", "qk_norm": False, "latent": None, "experts.norm_topk_prob": True, **_NO_SHARED},
        required=(*SIZES, "num_key_value_heads", *SIZES_OF_EXPERTS[:2]),
        keys={
            **_LLAMA_KEYS,
            "experts.num_experts": "num_local_experts",
            "experts.num_experts_per_tok": "num_experts_per_tok",
            "experts.moe_intermediate_size": "intermediate_size",
            "experts.router_aux_loss_coef": "router_aux_loss_coef",
        },
        defaults={
            **_LLAMA_DEFAULTS,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "experts.router_aux_loss_coef": 0.001,
        },
        **_LLAMA_LIKE,
    ),
    Architecture(
        name="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        fixed={"family": "llama", "qk_norm": False, "experts.gate": "sigmoid"},
        required=(*SIZES, *SIZES_OF_EXPERTS, *SIZES_OF_LATENTS),
        keys={
            **{field: key for field, key in _LLAMA_KEYS.items() if field != "head_dim"},
            **{name: name.removeprefix("latent.") for name in SIZES_OF_LATENTS},
            "experts.num_experts": "n_routed_experts",
            **{f"experts.{name}": name for name in _GIVEN_BY_DEEPSEEK},
            "experts.router_aux_loss_coef": "aux_loss_alpha",
        },
        defaults={
            **_LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "experts.norm_topk_prob": True,
            "experts.routed_scaling_factor": 2.5,
            "experts.n_shared_experts": 1,
            "experts.first_k_dense_replace": 3,
            "experts.n_group": 8,
            "experts.topk_group": 4,
            "experts.router_aux_loss_coef": 0.0,
        },
        only={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        activation=("hidden_act", ("silu",)),
        said={"attention_bias": False, "rope_interleave": True},
    ),
    Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        fixed={**_DENSE, "family": "gpt2", "qk_norm": False},
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "tie_word_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "n_positions",
            "dropout": "resid_pdrop",
            "attention_dropout": "attn_pdrop",
        },
        required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        defaults={
            "tie_word_embeddings": True,
            "norm_eps": 1e-5,
            "max_position_embeddings": 1024,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        activation=("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        said={},
    ),
)
"""All that are built."""
