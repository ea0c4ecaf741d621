"""The architectures that the tests cover: one row each, data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One tested model class.

    model_type: `config.model_type` of the instance that is patched. A text model and the
        vision-language model around it have one each, so it names a row uniquely.
    class_name: the class with the language-model head, as `transformers` exports it.
    family: group in docs/models.md: "Llama", "Gemma", "Qwen" or "Others".
    kinds: of its layers on kernels, as `layers` of `apply_patch` names them: one warning names
        those that are not found. "" where none has a kernel.
    """

    model_type: str
    class_name: str
    family: str
    kinds: str = "rms_norm rotary attention gated"


# kinds of mixtures, without feed-forward layers beside the routed experts, and with
ROUTED = "rms_norm rotary attention experts"
SHARED = "rms_norm rotary attention gated experts"
# kinds of models with recurrent layers, without a mixture and with
HYBRID = "rms_norm rotary attention gated recurrent"
SHARED_HYBRID = f"{SHARED} recurrent"
# where these are gated delta nets
LINEAR, SHARED_LINEAR = f"{HYBRID} delta_net", f"{SHARED_HYBRID} delta_net"


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("afmoe", "AfmoeForCausalLM", "Others", SHARED),
    Architecture("apertus", "ApertusForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture("arcee", "ArceeForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture("aria", "AriaForConditionalGeneration", "Others", SHARED),
    Architecture("aria_text", "AriaTextForCausalLM", "Others", SHARED),
    Architecture("audioflamingo3", "AudioFlamingo3ForConditionalGeneration", "Others"),
    Architecture("axk1", "AXK1ForCausalLM", "Others", SHARED),
    Architecture("axk2", "AXK2ForCausalLM", "Others", SHARED),
    Architecture(
        "aya_vision", "AyaVisionForConditionalGeneration", "Others", "rotary attention gated"
    ),
    Architecture("bailing_hybrid", "BailingHybridForCausalLM", "Others", SHARED_HYBRID),
    Architecture("bamba", "BambaForCausalLM", "Others", HYBRID),
    Architecture("beam", "BeamForCausalLM", "Others", SHARED),
    Architecture("bert", "BertLMHeadModel", "Others", ""),
    Architecture("bert-generation", "BertGenerationDecoder", "Others", ""),
    Architecture("big_bird", "BigBirdForCausalLM", "Others", ""),
    Architecture("biogpt", "BioGptForCausalLM", "Others", "attention"),
    Architecture("bitnet", "BitNetForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture("blip_text_model", "BlipTextLMHeadModel", "Others", ""),
    Architecture("bloom", "BloomForCausalLM", "Others", ""),
    Architecture("blt", "BltForCausalLM", "Others", "rms_norm attention gated"),
    Architecture("camembert", "CamembertForCausalLM", "Others", ""),
    Architecture("codegen", "CodeGenForCausalLM", "Others", "attention"),
    Architecture("cohere", "CohereForCausalLM", "Others", "rotary attention gated"),
    Architecture("cohere2", "Cohere2ForCausalLM", "Others", "rotary attention gated"),
    Architecture("cohere2_moe", "Cohere2MoeForCausalLM", "Others", "rotary attention experts"),
    Architecture(
        "cohere2_vision",
        "Cohere2VisionForConditionalGeneration",
        "Others",
        "rotary attention gated",
    ),
    Architecture(
        "cohere_compass",
        "CohereCompassForConditionalGeneration",
        "Others",
        "rotary attention gated",
    ),
    Architecture(
        "cohere_compass_text", "CohereCompassForCausalLM", "Others", "rotary attention gated"
    ),
    Architecture(
        "cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", "Others", "rms_norm rotary attention"
    ),
    Architecture("cosmos3_omni", "Cosmos3OmniForConditionalGeneration", "Others"),
    Architecture("ctrl", "CTRLLMHeadModel", "Others", "attention"),
    Architecture("cwm", "CwmForCausalLM", "Others"),
    Architecture("data2vec-text", "Data2VecTextForCausalLM", "Others", ""),
    Architecture("dbrx", "DbrxForCausalLM", "Others", "rotary attention"),
    Architecture("deepseek_v2", "DeepseekV2ForCausalLM", "Others", SHARED),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", "Others", SHARED),
    Architecture("deepseek_v32", "DeepseekV32ForCausalLM", "Others", SHARED),
    Architecture("deepseek_v4", "DeepseekV4ForCausalLM", "Others", "rms_norm attention experts"),
    Architecture("deepseek_vl", "DeepseekVLForConditionalGeneration", "Others"),
    Architecture("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration", "Others"),
    Architecture("diffllama", "DiffLlamaForCausalLM", "Others"),
    Architecture("doge", "DogeForCausalLM", "Others", "rms_norm rotary gated"),
    Architecture("dots1", "Dots1ForCausalLM", "Others", SHARED),
    Architecture("dots3_note_text", "Dots3NoteForCausalLM", "Others", SHARED),
    Architecture("electra", "ElectraForCausalLM", "Others", ""),
    Architecture("emu3", "Emu3ForConditionalGeneration", "Others"),
    Architecture("emu3_text_model", "Emu3ForCausalLM", "Others"),
    Architecture("ernie", "ErnieForCausalLM", "Others", ""),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM", "Others"),
    Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Others", SHARED),
    Architecture("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", "Others", SHARED),
    Architecture("evolla", "EvollaForProteinText2Text", "Others"),
    Architecture("exaone4", "Exaone4ForCausalLM", "Others"),
    Architecture("exaone4_5", "Exaone4_5_ForConditionalGeneration", "Others"),
    Architecture("exaone_moe", "ExaoneMoeForCausalLM", "Others", SHARED),
    Architecture("falcon", "FalconForCausalLM", "Others", "rotary"),
    Architecture(
        "falcon_h1", "FalconH1ForCausalLM", "Others", "rms_norm rotary attention recurrent"
    ),
    Architecture("falcon_mamba", "FalconMambaForCausalLM", "Others", "rms_norm"),
    Architecture("flex_olmo", "FlexOlmoForCausalLM", "Others", ROUTED),
    Architecture("flint", "FlintForCausalLM", "Others", SHARED),
    Architecture("fuyu", "FuyuForCausalLM", "Others", "rotary attention"),
    Architecture("gemma", "GemmaForCausalLM", "Gemma"),
    Architecture("gemma2", "Gemma2ForCausalLM", "Gemma"),
    Architecture("gemma3", "Gemma3ForConditionalGeneration", "Gemma"),
    Architecture("gemma3_text", "Gemma3ForCausalLM", "Gemma"),
    Architecture("gemma3n", "Gemma3nForConditionalGeneration", "Gemma"),
    Architecture("gemma3n_text", "Gemma3nForCausalLM", "Gemma"),
    Architecture("gemma4", "Gemma4ForConditionalGeneration", "Gemma"),
    Architecture("gemma4_text", "Gemma4ForCausalLM", "Gemma"),
    Architecture("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "Gemma"),
    Architecture("gemma4_unified_text", "Gemma4UnifiedForCausalLM", "Gemma"),
    Architecture("glm", "GlmForCausalLM", "Others"),
    Architecture("glm4", "Glm4ForCausalLM", "Others"),
    Architecture("glm46v", "Glm46VForConditionalGeneration", "Others"),
    Architecture("glm4_moe", "Glm4MoeForCausalLM", "Others", SHARED),
    Architecture("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "Others", SHARED),
    Architecture("glm4v", "Glm4vForConditionalGeneration", "Others"),
    Architecture("glm4v_moe", "Glm4vMoeForConditionalGeneration", "Others", SHARED),
    Architecture("glm_moe_dsa", "GlmMoeDsaForCausalLM", "Others", SHARED),
    Architecture("glm_ocr", "GlmOcrForConditionalGeneration", "Others"),
    Architecture("glmasr", "GlmAsrForConditionalGeneration", "Others"),
    Architecture("got_ocr2", "GotOcr2ForConditionalGeneration", "Others"),
    Architecture("gpt2", "GPT2LMHeadModel", "Others", "attention"),
    Architecture("gpt_bigcode", "GPTBigCodeForCausalLM", "Others", "attention"),
    Architecture("gpt_neo", "GPTNeoForCausalLM", "Others", ""),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "Others", "rotary attention"),
    Architecture("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "Others", "rotary"),
    Architecture("gpt_oss", "GptOssForCausalLM", "Others", ROUTED),
    Architecture("gptj", "GPTJForCausalLM", "Others", "attention"),
    Architecture("granite", "GraniteForCausalLM", "Others"),
    Architecture("granite_docling", "GraniteDoclingForConditionalGeneration", "Others"),
    Architecture("granite_speech", "GraniteSpeechForConditionalGeneration", "Others"),
    Architecture("granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration", "Others"),
    Architecture("granite_swa", "GraniteSWAForCausalLM", "Others"),
    Architecture("granitemoe", "GraniteMoeForCausalLM", "Others", ROUTED),
    Architecture("granitemoe_swa", "GraniteMoeSWAForCausalLM", "Others", ROUTED),
    Architecture("granitemoehybrid", "GraniteMoeHybridForCausalLM", "Others", SHARED_HYBRID),
    Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", "Others", ROUTED),
    Architecture("helium", "HeliumForCausalLM", "Others"),
    Architecture("hrm_text", "HrmTextForCausalLM", "Others"),
    Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "Others"),
    Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "Others", SHARED),
    Architecture("hy_v3", "HYV3ForCausalLM", "Others", SHARED),
    Architecture("hy_v4", "HYV4ForCausalLM", "Others", SHARED),
    Architecture("hyperclovax", "HyperCLOVAXForCausalLM", "Others"),
    Architecture("hyperclovax_vision_v2", "HyperCLOVAXVisionV2ForConditionalGeneration", "Others"),
    Architecture("idefics2", "Idefics2ForConditionalGeneration", "Others"),
    Architecture("idefics3", "Idefics3ForConditionalGeneration", "Others"),
    Architecture("inkling_text", "InklingForCausalLM", "Others", "rms_norm attention experts"),
    Architecture("internvl", "InternVLForConditionalGeneration", "Others"),
    Architecture("jais2", "Jais2ForCausalLM", "Others", "rotary attention"),
    Architecture("jamba", "JambaForCausalLM", "Others", "rms_norm attention gated experts"),
    Architecture("janus", "JanusForConditionalGeneration", "Others"),
    Architecture("jetmoe", "JetMoeForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture("kimi_k25", "Kimi_K25ForConditionalGeneration", "Others", SHARED),
    Architecture(
        "kimi_linear",
        "KimiLinearForCausalLM",
        "Others",
        "rms_norm attention gated experts recurrent",
    ),
    Architecture("kolibri1", "Kolibri1ForCausalLM", "Others", SHARED),
    Architecture("kosmos-2.5", "Kosmos2_5ForConditionalGeneration", "Others", "rms_norm attention"),
    Architecture("laguna", "LagunaForCausalLM", "Others", SHARED),
    Architecture("lfm2", "Lfm2ForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture(
        "lfm2_moe", "Lfm2MoeForCausalLM", "Others", "rms_norm rotary attention experts recurrent"
    ),
    Architecture(
        "lfm2_vl", "Lfm2VlForConditionalGeneration", "Others", "rms_norm rotary attention"
    ),
    Architecture("lfm3", "Lfm3ForCausalLM", "Others", "rms_norm rotary attention recurrent"),
    Architecture(
        "lfm3_vl", "Lfm3VlForConditionalGeneration", "Others", "rms_norm rotary attention recurrent"
    ),
    Architecture("lighton_ocr", "LightOnOcrForConditionalGeneration", "Others"),
    Architecture("llama", "LlamaForCausalLM", "Llama"),
    Architecture("llama4", "Llama4ForConditionalGeneration", "Llama"),
    Architecture("llama4_text", "Llama4ForCausalLM", "Llama"),
    Architecture("llava", "LlavaForConditionalGeneration", "Others"),
    Architecture("llava_next", "LlavaNextForConditionalGeneration", "Others"),
    Architecture("llava_next_video", "LlavaNextVideoForConditionalGeneration", "Others"),
    Architecture("llava_onevision", "LlavaOnevisionForConditionalGeneration", "Others"),
    Architecture("longcat_flash", "LongcatFlashForCausalLM", "Others"),
    Architecture("longt5", "LongT5ForConditionalGeneration", "Others", "rms_norm attention"),
    Architecture("m2m_100", "M2M100ForConditionalGeneration", "Others", "attention"),
    Architecture("mamba", "MambaForCausalLM", "Others", "rms_norm"),
    Architecture("mamba2", "Mamba2ForCausalLM", "Others", "rms_norm"),
    Architecture("megatron-bert", "MegatronBertForCausalLM", "Others", ""),
    Architecture("mellum", "MellumForCausalLM", "Others", ROUTED),
    Architecture("mimo_v2_flash", "MiMoV2FlashForCausalLM", "Others", SHARED),
    Architecture("minicpm3", "MiniCPM3ForCausalLM", "Others"),
    Architecture("minicpm_ocr", "MiniCPMOcrForConditionalGeneration", "Others", LINEAR),
    Architecture("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", "Others", LINEAR),
    Architecture("minicpmv4_7", "MiniCPMV4_7ForConditionalGeneration", "Others", LINEAR),
    Architecture("minimax", "MiniMaxForCausalLM", "Others", ROUTED),
    Architecture("minimax_m2", "MiniMaxM2ForCausalLM", "Others", ROUTED),
    Architecture("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", "Others", ROUTED),
    Architecture("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", "Others", ROUTED),
    Architecture("ministral", "MinistralForCausalLM", "Others"),
    Architecture("ministral3", "Ministral3ForCausalLM", "Others"),
    Architecture("mistral", "MistralForCausalLM", "Others"),
    Architecture("mistral3", "Mistral3ForConditionalGeneration", "Others"),
    Architecture("mistral4", "Mistral4ForCausalLM", "Others", SHARED),
    Architecture("mistral_large4", "MistralLarge4ForConditionalGeneration", "Others", SHARED),
    Architecture("mixtral", "MixtralForCausalLM", "Others", ROUTED),
    Architecture("mllama", "MllamaForConditionalGeneration", "Llama"),
    Architecture("mllama_text_model", "MllamaForCausalLM", "Llama"),
    Architecture(
        "modernbert-decoder", "ModernBertDecoderForCausalLM", "Others", "rotary attention"
    ),
    Architecture("moshi", "MoshiForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture(
        "moss_transcribe_diarize", "MossTranscribeDiarizeForConditionalGeneration", "Others"
    ),
    Architecture("mpt", "MptForCausalLM", "Others", ""),
    Architecture("mt5", "MT5ForConditionalGeneration", "Others", "rms_norm attention"),
    Architecture("muse_glimmer", "MuseGlimmerForConditionalGeneration", "Others"),
    Architecture("musicflamingo", "MusicFlamingoForConditionalGeneration", "Others"),
    Architecture("nanochat", "NanoChatForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture("nemotron", "NemotronForCausalLM", "Others", "rotary attention"),
    Architecture("nemotron_h", "NemotronHForCausalLM", "Others", "rms_norm attention recurrent"),
    Architecture("olmo", "OlmoForCausalLM", "Others", "rotary attention gated"),
    Architecture("olmo2", "Olmo2ForCausalLM", "Others"),
    Architecture("olmo3", "Olmo3ForCausalLM", "Others"),
    Architecture("olmo_hybrid", "OlmoHybridForCausalLM", "Others", LINEAR),
    Architecture("olmoe", "OlmoeForCausalLM", "Others", ROUTED),
    Architecture("openai-gpt", "OpenAIGPTLMHeadModel", "Others", ""),
    Architecture("opt", "OPTForCausalLM", "Others", "attention"),
    Architecture("ovis2", "Ovis2ForConditionalGeneration", "Others"),
    Architecture("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", "Others"),
    Architecture(
        "paligemma", "PaliGemmaForConditionalGeneration", "Gemma", "rms_norm rotary gated"
    ),
    Architecture("pegasus_x", "PegasusXForConditionalGeneration", "Others", ""),
    Architecture("persimmon", "PersimmonForCausalLM", "Others", "rotary attention"),
    Architecture("phi", "PhiForCausalLM", "Others", "rotary attention"),
    Architecture("phi3", "Phi3ForCausalLM", "Others"),
    Architecture("phi4_multimodal", "Phi4MultimodalForCausalLM", "Others"),
    Architecture("phimoe", "PhimoeForCausalLM", "Others", "rotary attention experts"),
    Architecture("pop2piano", "Pop2PianoForConditionalGeneration", "Others", "rms_norm attention"),
    Architecture("qianfan_ocr", "QianfanOCRForConditionalGeneration", "Others"),
    Architecture("qwen2", "Qwen2ForCausalLM", "Qwen"),
    Architecture("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen"),
    Architecture("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen"),
    Architecture("qwen2_audio", "Qwen2AudioForConditionalGeneration", "Qwen"),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen", SHARED),
    Architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen"),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen"),
    Architecture("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen", LINEAR),
    Architecture("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen", SHARED_LINEAR),
    Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "Qwen", SHARED_LINEAR),
    Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen", LINEAR),
    Architecture("qwen3_asr", "Qwen3ASRForConditionalGeneration", "Qwen"),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen", ROUTED),
    Architecture("qwen3_next", "Qwen3NextForCausalLM", "Qwen", SHARED_LINEAR),
    Architecture(
        "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen", ROUTED
    ),
    Architecture("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen"),
    Architecture("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen", ROUTED),
    Architecture("qwen4_exp", "Qwen4ExpForConditionalGeneration", "Qwen", SHARED_LINEAR),
    Architecture("qwen4_exp_text", "Qwen4ExpForCausalLM", "Qwen", SHARED_LINEAR),
    Architecture("recurrent_gemma", "RecurrentGemmaForCausalLM", "Gemma"),
    Architecture("reformer", "ReformerModelWithLMHead", "Others", ""),
    Architecture("rembert", "RemBertForCausalLM", "Others", ""),
    Architecture("roberta", "RobertaForCausalLM", "Others", ""),
    Architecture("roberta-prelayernorm", "RobertaPreLayerNormForCausalLM", "Others", ""),
    Architecture("roc_bert", "RoCBertForCausalLM", "Others", ""),
    Architecture("roformer", "RoFormerForCausalLM", "Others", ""),
    Architecture("rwkv", "RwkvForCausalLM", "Others", ""),
    Architecture("seamless_m4t", "SeamlessM4TForTextToText", "Others", "attention"),
    Architecture("seamless_m4t_v2", "SeamlessM4Tv2ForTextToText", "Others", "attention"),
    Architecture("seed_oss", "SeedOssForCausalLM", "Others", "rms_norm rotary attention"),
    Architecture("smollm3", "SmolLM3ForCausalLM", "Others"),
    Architecture("smolvlm", "SmolVLMForConditionalGeneration", "Others"),
    Architecture("solar_open", "SolarOpenForCausalLM", "Others", SHARED),
    Architecture("stablelm", "StableLmForCausalLM", "Others", "rotary attention gated"),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "Others", "rotary attention"),
    Architecture("step3p7", "Step3p7ForConditionalGeneration", "Others", "rotary attention"),
    Architecture(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "Others",
        "rms_norm attention",
    ),
    Architecture("t5", "T5ForConditionalGeneration", "Others", "rms_norm attention"),
    Architecture(
        "t5gemma", "T5GemmaForConditionalGeneration", "Others", "rms_norm rotary attention"
    ),
    Architecture("t5gemma2", "T5Gemma2ForConditionalGeneration", "Others", "rms_norm rotary"),
    Architecture("umt5", "UMT5ForConditionalGeneration", "Others", "rms_norm attention"),
    Architecture("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", "Others", SHARED),
    Architecture("vaultgemma", "VaultGemmaForCausalLM", "Gemma"),
    Architecture("vibevoice", "VibeVoiceForConditionalGeneration", "Others"),
    Architecture("vibevoice_asr", "VibeVoiceAsrForConditionalGeneration", "Others"),
    Architecture("video_llama_3", "VideoLlama3ForConditionalGeneration", "Others"),
    Architecture("video_llava", "VideoLlavaForConditionalGeneration", "Others"),
    Architecture("vipllava", "VipLlavaForConditionalGeneration", "Others"),
    Architecture("voxtral", "VoxtralForConditionalGeneration", "Others"),
    Architecture("xglm", "XGLMForCausalLM", "Others", ""),
    Architecture("xlm-roberta", "XLMRobertaForCausalLM", "Others", ""),
    Architecture("xlm-roberta-xl", "XLMRobertaXLForCausalLM", "Others", ""),
    Architecture("xlstm", "xLSTMForCausalLM", "Others", "rms_norm"),
    Architecture("xmod", "XmodForCausalLM", "Others", ""),
    Architecture("youtu", "YoutuForCausalLM", "Others"),
    Architecture("zamba", "ZambaForCausalLM", "Others", "rms_norm attention gated recurrent"),
    Architecture("zamba2", "Zamba2ForCausalLM", "Others", "rms_norm rotary attention recurrent"),
    Architecture("zaya", "ZayaForCausalLM", "Others", ROUTED),
)
