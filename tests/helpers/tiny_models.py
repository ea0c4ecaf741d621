"""The smallest random-weight model of every registry row, and batches to run it on.

One table of small sizes serves every config class by the names of the fields that it has; what a
class needs beyond that stands in DEVIATIONS, each with its reason.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, SiglipVisionConfig

from liger_patch.registry import Architecture, available

Batch = dict[str, torch.Tensor]
WITH_IMAGES = [row for row in available() if row.class_name.endswith("ConditionalGeneration")]

VOCAB_SIZE = 131  # a prime: a multiple of no block size
FIRST_WORD, END_OF_WORDS = 8, 110  # tiny_batch draws its ids from here: none is special
PAD, BOS, EOS, IMAGE, VIDEO, AUDIO, VISION_START, AUDIO_START = 0, 1, 2, 120, 121, 122, 123, 124
IMAGE_SIZE, PATCH_SIZE, MERGE_SIZE = 16, 4, 2  # pixels, pixels, patches along one side of a token
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "encoder_layers": 1,
    "depth": 1,
    "num_global_layers": 1,
    "conf_num_hidden_layers": 1,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "audio_embed_dim": 32,
    "mm_embed_dim": 32,
    "lru_width": 32,
    "out_hidden_size": 32,
    "output_dim": 32,
    "output_proj_dims": 32,
    "projection_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "hidden_size_per_layer_input": 8,
    "hc_lowrank": 8,
    "laurel_rank": 4,
    "downsample_hidden_size": 8,
    "subsampling_conv_channels": [8, 8],
    "sscp_conv_channel_size": [8, 8],
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "encoder_ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "attention_heads": 4,
    "encoder_attention_heads": 4,
    "conf_num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "pooling_kernel_size": MERGE_SIZE,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "mm_posemb_size": 16,
    "mm_tokens_per_image": 16,
    "input_feat_size": 16,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "audio_token_id": AUDIO,
    "audio_token_index": AUDIO,
    "vision_start_token_id": VISION_START,
    "audio_start_token_id": AUDIO_START,
    # Wide enough that logits differ, low enough that a cap or a scale of them changes the loss.
    "initializer_range": 0.3,
    "final_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0,
    "logits_scaling": 4.0,
    "logit_scale": 0.5,
}

# By the model_type of the config or sub-config that is built.
DEVIATIONS: dict[str, dict[str, Any]] = {
    # Half of the layers reuse the keys and values of the last layer of their own kind.
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    # Ids from vocab_offset on are looked up in the tower's own embedding.
    "gemma3n_audio": {"vocab_offset": AUDIO, "vocab_size": VOCAB_SIZE - AUDIO},
    # Full-attention layers have wider heads. The checkpoints cap the logits, the defaults do not.
    "gemma4_text": {"global_head_dim": 16, "final_logit_softcapping": 3.0},
    "gemma4_unified_text": {"global_head_dim": 16, "final_logit_softcapping": 3.0},
    # The forward or the constructor reads an id to which Transformers 5.0 gives no default.
    "llama4": {"pad_token_id": PAD},
    "phi": {"pad_token_id": PAD},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VISION_START},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VISION_START},
    "qwen3_vl_moe_text": {"pad_token_id": PAD},
    # A token holds the four patches that pixel shuffle joins.
    "llama4_vision_model": {"intermediate_size": 4 * 32},
    # Cross attention sits in layers 3, 8, ... by default: in none of the first two.
    "mllama_text_model": {"cross_attention_layers": [1]},
    # The outputs of the listed layers and of the last one are concatenated.
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 64},
    # The sections of a multimodal rotary embedding sum to half of a head.
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    # The token indexer has no default sizes.
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    # The default pattern has its attention layer third; embeddings get sqrt(scale / 4) instead of
    # initializer_range.
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "w_init_variance_scale": 0.36},
}


def tiny_model(
    row: Architecture, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A random-weight model of `row` in training mode.

    The same seed gives the same weights, in any dtype but for rounding.
    """
    model_class = getattr(transformers, row.class_name)
    config = model_class.config_class(**_tiny_arguments(model_class.config_class))
    if row.model_type == "gemma3n":
        # Its own tower needs timm and has 300M parameters. The config's type check admits no
        # other tower, nor does from_pretrained: this model cannot be loaded from a checkpoint.
        embedder = {"vocab_offset": IMAGE, "vocab_size": AUDIO - IMAGE, "rms_norm_eps": 1e-6}
        tower = SiglipVisionConfig(**_tiny_arguments(SiglipVisionConfig), **embedder)
        object.__setattr__(config, "vision_config", tower)
    # Experts in plain operations: the grouped matrix product of later Transformers has no float64.
    options = {"experts_implementation": "eager"}
    torch.manual_seed(seed)
    drawn = model_class._from_config(config, dtype=torch.float32, **options)
    for values in drawn.parameters():
        if not values.any():  # gates, projectors and biases that start by doing nothing
            torch.nn.init.normal_(values, std=0.3)
    model = model_class._from_config(config, dtype=dtype, **options)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), drawn.parameters(), strict=True):
            parameter.copy_(values)
    return model


def tiny_batch(
    model: PreTrainedModel,
    *,
    batch: int = 2,
    length: int = 9,
    seed: int = 0,
    ignored: float = 0.3,
) -> Batch:
    """Text inputs of shape (batch, length) with labels.

    A share `ignored` of the labels is -100. Where there are two sequences or more, the last one
    ends in padding: about a quarter of it, attention mask 0, labels -100.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(FIRST_WORD, END_OF_WORDS, (batch, length), generator=generator)
    order = torch.randperm(batch * length, generator=generator)
    labels = input_ids.flatten().index_fill(0, order[: round(ignored * batch * length)], -100)
    labels = labels.view(batch, length)
    attention_mask = torch.ones_like(input_ids)
    if batch > 1:
        end = length - length // 4
        input_ids[-1, end:] = PAD
        attention_mask[-1, end:] = 0
        labels[-1, end:] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    # Gemma 3 and PaliGemma refuse to train without them.
    for name in {"token_type_ids", "mm_token_type_ids"} & _forward_arguments(model):
        inputs[name] = torch.zeros_like(input_ids)
    return {name: value.to(model.device) for name, value in inputs.items()}


def takes_images(model: PreTrainedModel) -> bool:
    """Whether `with_image` serves `model`."""
    if model.config.model_type == "gemma3n":  # its tower here is a stand-in
        return False
    if model.config.model_type == "llama4" and transformers.__version__.startswith("5.0."):
        return False  # its forward reads an attribute that its vision output does not have
    return "pixel_values" in _forward_arguments(model)


def with_image(model: PreTrainedModel, batch: Batch, *, seed: int = 0) -> Batch:
    """`batch` with one random image before the text of each sequence, ignored by the labels."""
    if not takes_images(model):
        raise ValueError(f"model takes no images here: {model.config.model_type!r}")
    arguments = _forward_arguments(model)
    sequences, length = batch["input_ids"].shape
    side = IMAGE_SIZE // PATCH_SIZE
    patch_values = 3 * PATCH_SIZE**2
    merged = (side // MERGE_SIZE) ** 2
    shape: tuple[int, ...] = (sequences, 3, IMAGE_SIZE, IMAGE_SIZE)
    extra: Batch = {}
    if "aspect_ratio_ids" in arguments:
        tokens, tiles = 1, model.config.vision_config.max_num_tiles
        shape = (sequences, 1, tiles, *shape[1:])
        first_tile = torch.zeros(sequences, 1, tiles, dtype=torch.long)
        first_tile[..., 0] = 1
        extra["aspect_ratio_ids"] = torch.ones(sequences, 1, dtype=torch.long)
        extra["aspect_ratio_mask"] = first_tile
        extra["cross_attention_mask"] = first_tile[:, None].repeat(1, tokens + length, 1, 1)
    elif "image_grid_thw" in arguments:
        tokens = merged
        frames = model.config.vision_config.temporal_patch_size
        shape = (sequences * side**2, patch_values * frames)
        extra["image_grid_thw"] = torch.tensor([[1, side, side]] * sequences)
    elif "image_position_ids" in arguments:
        tokens = merged
        if model.config.model_type == "gemma4_unified":  # merges pixels, not encoded patches
            side, patch_values = side // MERGE_SIZE, patch_values * MERGE_SIZE**2
        shape = (sequences, side**2, patch_values)
        grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        extra["image_position_ids"] = grid.repeat(sequences, 1, 1)
    else:
        tokens = merged if model.config.model_type in ("llama4", "mistral3") else side**2
        if model.config.model_type == "mistral3":
            extra["image_sizes"] = torch.tensor([[IMAGE_SIZE, IMAGE_SIZE]] * sequences)
    generator = torch.Generator().manual_seed(seed)
    extra["pixel_values"] = torch.randn(shape, generator=generator).to(model.dtype)

    prompt = [IMAGE] * tokens
    if "image_grid_thw" in arguments:
        prompt = [VISION_START, *prompt]
    image_ids = torch.tensor([prompt] * sequences)
    image_type = (image_ids == IMAGE).long()
    before = {
        "input_ids": image_ids,
        "attention_mask": torch.ones_like(image_ids),
        "labels": torch.full_like(image_ids, -100),
        "token_type_ids": image_type,
        "mm_token_type_ids": image_type,
    }
    joined = {
        name: torch.cat([before[name].to(value.device), value], 1) for name, value in batch.items()
    }
    return joined | {name: value.to(model.device) for name, value in extra.items()}


def _tiny_arguments(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """SIZES for every field of `config_class` that is on by default, sub-configs included."""
    default = config_class()
    fields = {
        name
        for name in inspect.signature(config_class.__init__).parameters
        if vars(default).get(config_class.attribute_map.get(name, name)) is not None
    }
    arguments = {name: size for name, size in SIZES.items() if name in fields}
    if "layer_types" in fields:
        kinds = list(dict.fromkeys(default.layer_types))
        arguments["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        arguments["num_hidden_layers"] = len(arguments["layer_types"])
    for name, inner in config_class.sub_configs.items():
        if inner is AutoConfig:
            inner = type(getattr(default, name))
        arguments[name] = {"model_type": inner.model_type, **_tiny_arguments(inner)}
    return {**arguments, **DEVIATIONS.get(config_class.model_type, {})}


def _forward_arguments(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
