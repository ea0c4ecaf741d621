"""Sizes of the smallest models: one table by the names of fields, and what single classes need
beyond it, each with its reason.
"""

from typing import Any

VOCAB_SIZE = 131  # a prime: a multiple of no block size
FIRST_WORD, END_OF_WORDS = 8, 110  # tiny_batch draws its ids from here: none is special
PAD, BOS, EOS = 0, 1, 2
IMAGE, VIDEO, AUDIO, VISION_START, AUDIO_START, VISION_END, AUDIO_END = range(120, 127)
IMAGE_SIZE, PATCH_SIZE, MERGE_SIZE = 16, 4, 2  # pixels, pixels, patches along one side of a token
NUM_TILES = 4  # of an image, at most
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

TILES = [[IMAGE_SIZE, 2 * IMAGE_SIZE], [2 * IMAGE_SIZE, IMAGE_SIZE]]  # sizes of tiled images
MINICPM = {"image_token_id": IMAGE, "video_token_id": VIDEO, "insert_layer_id": 0}
WAVEFORM = {"num_filters": 2, "depths": [1] * 3, "downsampling_ratios": [2, 2]}


def each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **each(
        "conf_num_hidden_layers depth encoder_layers mamba_n_groups n_group n_groups"
        " num_global_layers topk_group",
        1,
    ),
    **each(
        "decoder_layers index_n_heads"
        " linear_num_key_heads moe_topk n_layer n_layers num_decoder_layers num_experts_per_tok"
        " num_hidden_layers num_key_value_heads num_layers zero_expert_num",
        2,
    ),
    **each(
        "attention_heads conf_num_attention_heads decoder_attention_heads encoder_attention_heads"
        " index_topk laurel_rank linear_num_heads linear_num_value_heads mamba_dt_rank n_head"
        " n_heads n_routed_experts num_attention_heads num_experts num_heads num_local_experts"
        " rotary_dim",
        4,
    ),
    **each(
        "chunk_size d_kv downsample_hidden_size hc_lowrank head_dim hidden_size_per_layer_input"
        " linear_head_dim linear_key_head_dim linear_value_head_dim mamba_chunk_size mamba_d_head"
        " mamba_d_state mamba_head_dim mamba_n_heads mamba_num_heads qk_nope_head_dim"
        " qk_rope_head_dim ssm_state_size state_size v_head_dim",
        8,
    ),
    **each(
        "index_head_dim input_feat_size kv_lora_rank max_source_positions mm_posemb_size"
        " mm_tokens_per_image num_mel_bins num_position_embeddings position_embedding_size"
        " q_lora_rank",
        16,
    ),
    **each("expert_ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size", 24),
    **each(
        "audio_embed_dim d_model embed_dim hidden_size lru_width mm_embed_dim n_ctx"
        " n_embd n_positions out_hidden_size output_dim output_proj_dims projection_dim"
        " projector_input_dim projector_output_dim vision_output_dim word_embed_proj_dim",
        32,
    ),
    **each(
        "d_ff decoder_ffn_dim dff encoder_ffn_dim ffn_dim ffn_hidden_size intermediate_size"
        " intermediate_size_mlp projector_hidden_size",
        48,
    ),
    "mamba_d_ssm": 64,
    **each("deepstack_visual_indexes fullatt_block_indexes", [0]),
    **each("sscp_conv_channel_size subsampling_conv_channels", [8, 8]),
    **each("vocab_size vocab_size_per_layer_input", VOCAB_SIZE),
    "pad_token_id": PAD,
    **each("bos_token_id decoder_start_token_id", BOS),
    "eos_token_id": EOS,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    **each("pooling_kernel_size spatial_merge_size", MERGE_SIZE),
    "max_num_tiles": NUM_TILES,
    **each("image_token_id image_token_index", IMAGE),
    **each("video_token_id video_token_index", VIDEO),
    **each("audio_token_id audio_token_index", AUDIO),
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
    # Wide enough that logits differ, low enough that a cap or a scale of them changes the loss.
    "initializer_range": 0.3,
    **each("final_logit_softcapping logits_soft_cap output_logit_soft_cap", 3.0),
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
    # Groups of four state-space attention heads are twice as wide as the model.
    "mamba2": {"num_heads": 8},
    # The cache of a decoder counts the layers of an encoder.
    "bart": {"encoder_layers": 2},
    # Blocks of the sparse attention are drawn at random.
    "big_bird": {"attention_type": "original_full"},
    # The default pattern has its attention layer, or its mixtures, behind the first two.
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    # Sizes without a default.
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "step3p5": {"sliding_window": 4},
    "xmod": {"default_language": "en_XX"},
    # The sections of a multimodal rotary embedding sum to half of a head: some have no default for
    # them, and in Transformers 5.0 none for padding.
    **each(
        "cosmos3_edge_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text"
        " qwen2_vl_text",
        {"rope_parameters": MROPE},
    ),
    "glm4v_text": {"rope_parameters": MROPE, "pad_token_id": PAD},
    "glm46v_text": {"rope_parameters": MROPE, "pad_token_id": PAD},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
    # The id that a decoder begins with is no field of these.
    **each("longt5 pop2piano switch_transformers t5", {"decoder_start_token_id": BOS}),
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # Its cache reads a number of layers that is no field. Hashes of bytes have 500,002 embeddings.
    "blt": {"encoder_hash_byte_group_vocab": 50, "num_hidden_layers": 2},
    "blt_local_decoder": {"hidden_size_global": 32},
    "blt_local_encoder": {"hidden_size_global": 32},
    # Full-attention layers do not rotate. The scale of the logits has no default.
    "cohere_compass_text": {
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": MROPE, "full_attention": None},
    },
    # Its sub-configs have no model_type. The forward reads two values that have no default. In
    # Transformers 5.0, experts are as wide as the model.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
    },
    # Sliding layers have sizes of their own.
    "dots3_note_text": {
        "shared_experts_intermediate_size": 24,
        "swa_head_dim": 16,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    # The first two layers have no experts by default.
    "flint": {"mlp_only_layers": [0]},
    # Axial positions take rows of one length. Dropout takes another random seed in each call.
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    # Its states have multiples of 64 features. Its cache overwrites what the backward pass reads.
    "xlstm": {"qk_dim_factor": 2.0, "v_dim_factor": 2.0, "use_cache": False},
    # Towers name their sizes otherwise.
    "blip_2_qformer": {"encoder_hidden_size": 32},
    "granite_speech_encoder": {"hidden_dim": 32, "input_dim": 16},
    "granite_speech_plus_encoder": {"hidden_dim": 32, "input_dim": 16},
    "janus_vision_model": {"num_image_tokens": 16},
    "janus_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1],
        "image_token_embed_dim": 32,
        "num_embeddings": 16,
    },
    "vibevoice_acoustic_tokenizer": WAVEFORM,
    "vibevoice_acoustic_tokenizer_encoder": WAVEFORM,
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 16},
    # The constructor reads a map from the tokenizer.
    "emu3": {
        "vocabulary_map": {
            "<image>": IMAGE,
            "<|extra_200|>": 127,
            **{f"<|visual token {i:06}|>": FIRST_WORD + i for i in range(16)},
        }
    },
    "emu3_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "attn_resolutions": [0],
        "codebook_size": 16,
    },
    # Experts of text and of images have one size each.
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 24], "rope_parameters": MROPE},
    # Two layers share an attention. Transformers 5.0 wants kernels unless told otherwise.
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "use_mamba_kernels": False,
    },
    # Sizes of images, and of what projects them, that the defaults have for large ones.
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "gemma3n": {"vision_soft_tokens_per_image": 16, "audio_soft_tokens_per_image": 8},
    "got_ocr2_vision": {
        "output_channels": 16,
        "mlp_dim": 48,
        "global_attn_indexes": [1],
        "window_size": 2,
    },
    "granite_docling_vision": {"scale_factor": 2},
    "idefics2_perceiver": {
        "resampler_n_latents": 4,
        "resampler_depth": 1,
        "resampler_n_heads": 4,
        "resampler_head_dim": 8,
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "kosmos-2.5": {"latent_query_num": 4},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 48},
    "llava_next": {"image_grid_pinpoints": TILES},
    "llava_next_video": {"image_grid_pinpoints": TILES},
    "llava_onevision": {"image_grid_pinpoints": TILES},
    "minicpm_ocr": MINICPM,
    "minicpmv4_6": MINICPM,
    "minicpmv4_7": MINICPM,
    "minimax_m3_vl": {"projector_hidden_size": 48},
    "muse_glimmer": {"out_hidden_size": 4 * 32},
    "ovis2": {"visual_indicator_token_ids": [VISION_START, VISION_END, 127, 128, 129]},
    "phi4_multimodal_vision": {"crop_size": IMAGE_SIZE},
    "phi4_multimodal_audio": {
        "num_blocks": 2,
        "input_size": 16,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 8,
        "nemo_final_size": 2,
    },
    "sam_vision_model": {"output_channels": 16, "global_attn_indexes": [0], "window_size": 2},
    "unlimited_ocr_sam_vision_model": {
        "output_channels": 16,
        "downsample_channels": [32, 32],
        "global_attn_indexes": [1],
        "window_size": 2,
        "mlp_dim": 48,
    },
    "vipllava": {"vision_feature_layer": [-2, -1]},
    # The frames of a spectrogram are joined until they have this size.
    "glmasr_encoder": {"intermediate_size": 4 * 32},
    "voxtral_encoder": {"intermediate_size": 4 * 32},
    "voxtral": {"audio_token_id": AUDIO},
}
