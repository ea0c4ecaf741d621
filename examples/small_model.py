"""A small, randomly initialised model of many text architectures."""

import torch
import transformers
from transformers import PreTrainedModel

from liger_patch.registry import available

HEAD_DIM = 32
EXPERTS = 4
OTHERS = (  # beside Llama, Gemma and Qwen: what the sizes below serve
    "cohere",
    "cohere2",
    "glm4",
    "granite",
    "granitemoe",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "smollm3",
    "starcoder2",
)


def text_model_types() -> list[str]:
    """The `model_type`s of text models known here that the installed Transformers has."""
    return [
        row.model_type
        for row in available()
        if row.class_name.endswith("ForCausalLM")
        and (row.family != "Others" or row.model_type in OTHERS)
    ]


def small_model(
    model_type: str,
    *,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    length: int,
    eos_token_id: int,
    head_dim: int = HEAD_DIM,
) -> PreTrainedModel:
    """A float32 model: the architecture's own defaults, and small sizes in every field named below.

    `hidden_size` must be a multiple of `2 * head_dim` (an even number of heads); `length` is in
    tokens. Four layers or more, so that architectures that mix kinds of layers have one of each.
    """
    heads = hidden_size // head_dim
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": length,
        # Mixtures of experts
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden_size,
        "shared_expert_intermediate_size": hidden_size,
        "intermediate_size_mlp": 3 * hidden_size,
        # Linear attention (Qwen 3-Next, 3.5, 4)
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        # Token indexer and hyper-connections (Qwen 4)
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 64,
        "indexer_compress_ratio": 16,
        "hc_lowrank": HEAD_DIM,
        # Embeddings of each layer, layers that share keys and values (Gemma 3n, 4)
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size_per_layer_input": HEAD_DIM,
        "laurel_rank": HEAD_DIM,
        "num_kv_shared_layers": 0,
        # Layers that attend to an image (Mllama)
        "cross_attention_layers": [],
    }
    class_name = next(row.class_name for row in available() if row.model_type == model_type)
    model_class = getattr(transformers, class_name)
    fields = model_class.config_class().to_dict()
    config = model_class.config_class(
        **{name: size for name, size in sizes.items() if name in fields},
        pad_token_id=None,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        use_cache=False,
    )
    return model_class(config)


@torch.no_grad()
def move_within_rounding(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Moves each trained weight by at most half an eps of `dtype`, which cannot tell them apart."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight *= 1 + torch.finfo(dtype).eps * (torch.rand_like(weight) - 0.5)
