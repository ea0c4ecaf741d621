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
    "projector_hidden_size": 48,
    "vision_output_dim": 32,
    "hidden_size_per_layer_input": 8,
    "hc_lowrank": 8,
    "laurel_rank": 4,
    "downsample_hidden_size": 8,
    "subsampling_conv_channels": [8, 8],
    "sscp_conv_channel_size": [8, 8],
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 32,
    "n_ctx": 32,
    "rotary_dim": 4,
    "emb_dim": 32,
    "dff": 48,
    "d_ff": 48,
    "d_kv": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": BOS,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "word_embed_proj_dim": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "state_size": 8,
    "n_groups": 1,
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
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "pooling_kernel_size": MERGE_SIZE,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "mm_posemb_size": 16,
    "mm_tokens_per_image": 16,
    "max_num_tiles": NUM_TILES,
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
    "vision_end_token_id": VISION_END,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
    # Wide enough that logits differ, low enough that a cap or a scale of them changes the loss.
    "initializer_range": 0.3,
    "final_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0,
    "output_logit_soft_cap": 3.0,
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
    # Groups of four state-space attention heads are twice as wide as the model.
    "mamba2": {"num_heads": 8},
    # The cache of a decoder counts the layers of an encoder.
    "bart": {"encoder_layers": 2},
    "bigbird_pegasus": {"encoder_layers": 2, "attention_type": "original_full"},
    "blenderbot": {"encoder_layers": 2},
    "blenderbot-small": {"encoder_layers": 2},
    "marian": {"encoder_layers": 2},
    "mbart": {"encoder_layers": 2},
    "mvp": {"encoder_layers": 2},
    "pegasus": {"encoder_layers": 2},
    "plbart": {"encoder_layers": 2},
    # Blocks of the sparse attention are drawn at random.
    "big_bird": {"attention_type": "original_full"},
    # The default pattern has its attention layer, or its mixtures, behind the first two.
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    # Sizes without a default.
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "step3p5": {"sliding_window": 4},
    "xmod": {"default_language": "en_XX"},
    # Which sections a multimodal rotary embedding has. Transformers 5.0 has no default for padding.
    "cosmos3_edge_text": {"rope_parameters": MROPE},
    "glm4v_text": {"rope_parameters": MROPE, "pad_token_id": PAD},
    "glm46v_text": {"rope_parameters": MROPE, "pad_token_id": PAD},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    # The id that a decoder begins with is no field of these.
    "longt5": {"decoder_start_token_id": BOS},
    "pop2piano": {"decoder_start_token_id": BOS},
    "switch_transformers": {"decoder_start_token_id": BOS},
    "t5": {"decoder_start_token_id": BOS},
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
