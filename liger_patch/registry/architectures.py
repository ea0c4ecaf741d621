"""The architectures that the tests cover: one row each, data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One tested model class.

    model_type: `config.model_type` of the instance that is patched. A text model and the
        vision-language model around it have one each, so it names a row uniquely.
    class_name: the class with the language-model head, as `transformers` exports it.
    family: heading in docs/models.md: "Llama", "Gemma", "Qwen" or "Others".
    layers: how the names of its norm's, attention's and gated feed-forward layer's classes begin
        ("Llama": LlamaRMSNorm, LlamaAttention, LlamaMLP; "Llama4": Llama4TextRMSNorm), which have
        kernels; several beginnings are separated by spaces. "" where none has.
    """

    model_type: str
    class_name: str
    family: str
    layers: str = ""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("afmoe", "AfmoeForCausalLM", "Others", "Afmoe"),
    Architecture("apertus", "ApertusForCausalLM", "Others", "Apertus"),
    Architecture("arcee", "ArceeForCausalLM", "Others", "Arcee"),
    Architecture("aria", "AriaForConditionalGeneration", "Others", "Aria AriaSharedExperts"),
    Architecture("aria_text", "AriaTextForCausalLM", "Others", "Aria AriaSharedExperts"),
    Architecture("audioflamingo3", "AudioFlamingo3ForConditionalGeneration", "Others", "Qwen2"),
    Architecture("axk1", "AXK1ForCausalLM", "Others", "AXK1"),
    Architecture("axk2", "AXK2ForCausalLM", "Others", "AXK2"),
    Architecture("aya_vision", "AyaVisionForConditionalGeneration", "Others", "Cohere2"),
    Architecture("bailing_hybrid", "BailingHybridForCausalLM", "Others", "BailingHybrid"),
    Architecture("bamba", "BambaForCausalLM", "Others", "Bamba"),
    Architecture("beam", "BeamForCausalLM", "Others", "Beam"),
    Architecture("bert", "BertLMHeadModel", "Others"),
    Architecture("bert-generation", "BertGenerationDecoder", "Others"),
    Architecture("big_bird", "BigBirdForCausalLM", "Others"),
    Architecture("biogpt", "BioGptForCausalLM", "Others", "BioGpt"),
    Architecture("bitnet", "BitNetForCausalLM", "Others", "BitNet"),
    Architecture("blip_text_model", "BlipTextLMHeadModel", "Others"),
    Architecture("bloom", "BloomForCausalLM", "Others"),
    Architecture("blt", "BltForCausalLM", "Others", "Blt"),
    Architecture("camembert", "CamembertForCausalLM", "Others"),
    Architecture("codegen", "CodeGenForCausalLM", "Others"),
    Architecture("cohere", "CohereForCausalLM", "Others", "Cohere"),
    Architecture("cohere2", "Cohere2ForCausalLM", "Others", "Cohere2"),
    Architecture("cohere2_moe", "Cohere2MoeForCausalLM", "Others", "Cohere2Moe"),
    Architecture("cohere2_vision", "Cohere2VisionForConditionalGeneration", "Others", "Cohere2"),
    Architecture(
        "cohere_compass",
        "CohereCompassForConditionalGeneration",
        "Others",
        "CohereCompass CohereCompassVision",
    ),
    Architecture("cohere_compass_text", "CohereCompassForCausalLM", "Others", "CohereCompass"),
    Architecture("cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", "Others", "Cosmos3Edge"),
    Architecture(
        "cosmos3_omni", "Cosmos3OmniForConditionalGeneration", "Others", "Qwen3VL Qwen3VLVision"
    ),
    Architecture("ctrl", "CTRLLMHeadModel", "Others", "MultiHead"),
    Architecture("cwm", "CwmForCausalLM", "Others", "Cwm"),
    Architecture("data2vec-text", "Data2VecTextForCausalLM", "Others"),
    Architecture("dbrx", "DbrxForCausalLM", "Others", "Dbrx"),
    Architecture("deepseek_v2", "DeepseekV2ForCausalLM", "Others", "DeepseekV2"),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", "Others", "DeepseekV3"),
    Architecture("deepseek_v32", "DeepseekV32ForCausalLM", "Others", "DeepseekV32"),
    Architecture("deepseek_v4", "DeepseekV4ForCausalLM", "Others", "DeepseekV4"),
    Architecture("deepseek_vl", "DeepseekVLForConditionalGeneration", "Others", "Llama"),
    Architecture(
        "deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration", "Others", "Llama"
    ),
    Architecture("diffllama", "DiffLlamaForCausalLM", "Others", "DiffLlama"),
    Architecture("doge", "DogeForCausalLM", "Others", "Doge"),
    Architecture("dots1", "Dots1ForCausalLM", "Others", "Dots1"),
    Architecture("dots3_note_text", "Dots3NoteForCausalLM", "Others", "Dots3Note"),
    Architecture("electra", "ElectraForCausalLM", "Others"),
    Architecture("emu3", "Emu3ForConditionalGeneration", "Others", "Emu3"),
    Architecture("emu3_text_model", "Emu3ForCausalLM", "Others", "Emu3"),
    Architecture("ernie", "ErnieForCausalLM", "Others"),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM", "Others", "Ernie4_5"),
    Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Others", "Ernie4_5_Moe"),
    Architecture(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Others",
        "Ernie4_5_VLMoe Ernie4_5_VLMoeVision",
    ),
    Architecture("evolla", "EvollaForProteinText2Text", "Others", "Evolla"),
    Architecture("exaone4", "Exaone4ForCausalLM", "Others", "Exaone4"),
    Architecture(
        "exaone4_5",
        "Exaone4_5_ForConditionalGeneration",
        "Others",
        "Exaone4 Exaone4_5_ Exaone4_5_Vision",
    ),
    Architecture("exaone_moe", "ExaoneMoeForCausalLM", "Others", "ExaoneMoe"),
    Architecture("falcon", "FalconForCausalLM", "Others", "Falcon"),
    Architecture("falcon_h1", "FalconH1ForCausalLM", "Others", "FalconH1"),
    Architecture("falcon_mamba", "FalconMambaForCausalLM", "Others", "FalconMamba"),
    Architecture("flex_olmo", "FlexOlmoForCausalLM", "Others", "FlexOlmo"),
    Architecture("flint", "FlintForCausalLM", "Others", "Flint"),
    Architecture("fuyu", "FuyuForCausalLM", "Others", "Persimmon"),
    Architecture("gemma", "GemmaForCausalLM", "Gemma", "Gemma"),
    Architecture("gemma2", "Gemma2ForCausalLM", "Gemma", "Gemma2"),
    Architecture("gemma3", "Gemma3ForConditionalGeneration", "Gemma", "Gemma3"),
    Architecture("gemma3_text", "Gemma3ForCausalLM", "Gemma", "Gemma3"),
    Architecture("gemma3n", "Gemma3nForConditionalGeneration", "Gemma", "Gemma3n"),
    Architecture("gemma3n_text", "Gemma3nForCausalLM", "Gemma", "Gemma3n"),
    Architecture("gemma4", "Gemma4ForConditionalGeneration", "Gemma", "Gemma4 Gemma4Vision"),
    Architecture("gemma4_text", "Gemma4ForCausalLM", "Gemma", "Gemma4"),
    Architecture(
        "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "Gemma", "Gemma4Unified"
    ),
    Architecture("gemma4_unified_text", "Gemma4UnifiedForCausalLM", "Gemma", "Gemma4Unified"),
    Architecture("glm", "GlmForCausalLM", "Others", "Glm"),
    Architecture("glm4", "Glm4ForCausalLM", "Others", "Glm4"),
    Architecture(
        "glm46v", "Glm46VForConditionalGeneration", "Others", "Glm4Vision Glm4v Glm4vVision"
    ),
    Architecture("glm4_moe", "Glm4MoeForCausalLM", "Others", "Glm4Moe"),
    Architecture("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "Others", "Glm4MoeLite"),
    Architecture(
        "glm4v", "Glm4vForConditionalGeneration", "Others", "Glm4Vision Glm4v Glm4vVision"
    ),
    Architecture(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        "Others",
        "Glm4vMoe Glm4vMoeision Glm4vMoeVision",
    ),
    Architecture("glm_moe_dsa", "GlmMoeDsaForCausalLM", "Others", "GlmMoeDsa"),
    Architecture("glm_ocr", "GlmOcrForConditionalGeneration", "Others", "GlmOcr GlmOcrVision"),
    Architecture("glmasr", "GlmAsrForConditionalGeneration", "Others", "GlmAsr Llama"),
    Architecture("got_ocr2", "GotOcr2ForConditionalGeneration", "Others", "Qwen2"),
    Architecture("gpt2", "GPT2LMHeadModel", "Others", "GPT2"),
    Architecture("gpt_bigcode", "GPTBigCodeForCausalLM", "Others", "GPTBigCode"),
    Architecture("gpt_neo", "GPTNeoForCausalLM", "Others"),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "Others", "GPTNeoX"),
    Architecture("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "Others", "GPTNeoXJapanese"),
    Architecture("gpt_oss", "GptOssForCausalLM", "Others", "GptOss"),
    Architecture("gptj", "GPTJForCausalLM", "Others"),
    Architecture("granite", "GraniteForCausalLM", "Others", "Granite"),
    Architecture(
        "granite_docling", "GraniteDoclingForConditionalGeneration", "Others", "GraniteDocling"
    ),
    Architecture("granite_speech", "GraniteSpeechForConditionalGeneration", "Others", "Granite"),
    Architecture(
        "granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration", "Others", "Granite"
    ),
    Architecture("granite_swa", "GraniteSWAForCausalLM", "Others", "GraniteSWA"),
    Architecture("granitemoe", "GraniteMoeForCausalLM", "Others", "GraniteMoe"),
    Architecture("granitemoe_swa", "GraniteMoeSWAForCausalLM", "Others", "GraniteMoeSWA"),
    Architecture("granitemoehybrid", "GraniteMoeHybridForCausalLM", "Others", "GraniteMoeHybrid"),
    Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", "Others", "GraniteMoeShared"),
    Architecture("helium", "HeliumForCausalLM", "Others", "Helium"),
    Architecture("hrm_text", "HrmTextForCausalLM", "Others", "Hrm"),
    Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "Others", "HunYuanDenseV1"),
    Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "Others", "HunYuanMoEV1"),
    Architecture("hy_v3", "HYV3ForCausalLM", "Others", "HYV3"),
    Architecture("hy_v4", "HYV4ForCausalLM", "Others", "HYV4"),
    Architecture("hyperclovax", "HyperCLOVAXForCausalLM", "Others", "HyperCLOVAX"),
    Architecture(
        "hyperclovax_vision_v2",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Others",
        "HyperCLOVAX Qwen2_5_VL Qwen2_5_VLVision",
    ),
    Architecture("idefics2", "Idefics2ForConditionalGeneration", "Others", "Idefics2 Mistral"),
    Architecture("idefics3", "Idefics3ForConditionalGeneration", "Others", "Llama"),
    Architecture("inkling_text", "InklingForCausalLM", "Others", "Inkling"),
    Architecture("internvl", "InternVLForConditionalGeneration", "Others", "Qwen2 Qwen3"),
    Architecture("jais2", "Jais2ForCausalLM", "Others", "Jais2"),
    Architecture("jamba", "JambaForCausalLM", "Others", "Jamba"),
    Architecture("janus", "JanusForConditionalGeneration", "Others", "Llama"),
    Architecture("jetmoe", "JetMoeForCausalLM", "Others", "JetMoe"),
    Architecture(
        "kimi_k25", "Kimi_K25ForConditionalGeneration", "Others", "DeepseekV3 Kimi_K25Vision"
    ),
    Architecture("kimi_linear", "KimiLinearForCausalLM", "Others", "KimiLinear"),
    Architecture("kolibri1", "Kolibri1ForCausalLM", "Others", "Kolibri1"),
    Architecture(
        "kosmos-2.5", "Kosmos2_5ForConditionalGeneration", "Others", "Kosmos2_5 Kosmos2_5Vision"
    ),
    Architecture("laguna", "LagunaForCausalLM", "Others", "Laguna"),
    Architecture("lfm2", "Lfm2ForCausalLM", "Others", "Lfm2"),
    Architecture("lfm2_moe", "Lfm2MoeForCausalLM", "Others", "Lfm2Moe"),
    Architecture("lfm2_vl", "Lfm2VlForConditionalGeneration", "Others", "Lfm2"),
    Architecture("lfm3", "Lfm3ForCausalLM", "Others", "Lfm3"),
    Architecture("lfm3_vl", "Lfm3VlForConditionalGeneration", "Others", "Lfm3 Lfm3VlVision"),
    Architecture(
        "lighton_ocr", "LightOnOcrForConditionalGeneration", "Others", "LightOnOcr Pixtral Qwen3"
    ),
    Architecture("llama", "LlamaForCausalLM", "Llama", "Llama"),
    Architecture("llama4", "Llama4ForConditionalGeneration", "Llama", "Llama4"),
    Architecture("llama4_text", "Llama4ForCausalLM", "Llama", "Llama4"),
    Architecture("llava", "LlavaForConditionalGeneration", "Others", "Llama Mistral"),
    Architecture("llava_next", "LlavaNextForConditionalGeneration", "Others", "Llama Mistral"),
    Architecture("llava_next_video", "LlavaNextVideoForConditionalGeneration", "Others", "Llama"),
    Architecture("llava_onevision", "LlavaOnevisionForConditionalGeneration", "Others", "Qwen2"),
    Architecture("longcat_flash", "LongcatFlashForCausalLM", "Others", "LongcatFlash"),
    Architecture("longt5", "LongT5ForConditionalGeneration", "Others", "LongT5"),
    Architecture("m2m_100", "M2M100ForConditionalGeneration", "Others", "M2M100"),
    Architecture("mamba", "MambaForCausalLM", "Others", "Mamba"),
    Architecture("mamba2", "Mamba2ForCausalLM", "Others", "Mamba2 Mamba"),
    Architecture("megatron-bert", "MegatronBertForCausalLM", "Others"),
    Architecture("mellum", "MellumForCausalLM", "Others", "Mellum"),
    Architecture("mimo_v2_flash", "MiMoV2FlashForCausalLM", "Others", "MiMoV2Flash"),
    Architecture("minicpm3", "MiniCPM3ForCausalLM", "Others", "MiniCPM3"),
    Architecture("minicpm_ocr", "MiniCPMOcrForConditionalGeneration", "Others", "Qwen3_5"),
    Architecture("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", "Others", "Qwen3_5"),
    Architecture("minicpmv4_7", "MiniCPMV4_7ForConditionalGeneration", "Others", "Qwen3_5"),
    Architecture("minimax", "MiniMaxForCausalLM", "Others", "MiniMax"),
    Architecture("minimax_m2", "MiniMaxM2ForCausalLM", "Others", "MiniMaxM2"),
    Architecture(
        "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", "Others", "MiniMaxM3VL"
    ),
    Architecture("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", "Others", "MiniMaxM3VL"),
    Architecture("ministral", "MinistralForCausalLM", "Others", "Ministral"),
    Architecture("ministral3", "Ministral3ForCausalLM", "Others", "Ministral3"),
    Architecture("mistral", "MistralForCausalLM", "Others", "Mistral"),
    Architecture(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "Others",
        "Mistral Ministral3 Mistral3 Pixtral",
    ),
    Architecture("mistral4", "Mistral4ForCausalLM", "Others", "Mistral4"),
    Architecture(
        "mistral_large4", "MistralLarge4ForConditionalGeneration", "Others", "MistralLarge4 Pixtral"
    ),
    Architecture("mixtral", "MixtralForCausalLM", "Others", "Mixtral"),
    Architecture("mllama", "MllamaForConditionalGeneration", "Llama", "Mllama"),
    Architecture("mllama_text_model", "MllamaForCausalLM", "Llama", "Mllama"),
    Architecture(
        "modernbert-decoder", "ModernBertDecoderForCausalLM", "Others", "ModernBertDecoder"
    ),
    Architecture("moshi", "MoshiForCausalLM", "Others", "Moshi"),
    Architecture(
        "moss_transcribe_diarize",
        "MossTranscribeDiarizeForConditionalGeneration",
        "Others",
        "Qwen3",
    ),
    Architecture("mpt", "MptForCausalLM", "Others"),
    Architecture("mt5", "MT5ForConditionalGeneration", "Others", "MT5"),
    Architecture(
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        "Others",
        "MuseGlimmer MuseGlimmerVision",
    ),
    Architecture("musicflamingo", "MusicFlamingoForConditionalGeneration", "Others", "Qwen2"),
    Architecture("nanochat", "NanoChatForCausalLM", "Others", "NanoChat"),
    Architecture("nemotron", "NemotronForCausalLM", "Others", "Nemotron"),
    Architecture("nemotron_h", "NemotronHForCausalLM", "Others", "NemotronH"),
    Architecture("olmo", "OlmoForCausalLM", "Others", "Olmo"),
    Architecture("olmo2", "Olmo2ForCausalLM", "Others", "Olmo2"),
    Architecture("olmo3", "Olmo3ForCausalLM", "Others", "Olmo3"),
    Architecture("olmo_hybrid", "OlmoHybridForCausalLM", "Others", "OlmoHybrid"),
    Architecture("olmoe", "OlmoeForCausalLM", "Others", "Olmoe"),
    Architecture("openai-gpt", "OpenAIGPTLMHeadModel", "Others"),
    Architecture("opt", "OPTForCausalLM", "Others", "OPT"),
    Architecture("ovis2", "Ovis2ForConditionalGeneration", "Others", "Ovis2 Qwen2"),
    Architecture(
        "paddleocr_vl", "PaddleOCRVLForConditionalGeneration", "Others", "PaddleOCR PaddleOCRVision"
    ),
    Architecture("paligemma", "PaliGemmaForConditionalGeneration", "Gemma", "Gemma2 Gemma"),
    Architecture("pegasus_x", "PegasusXForConditionalGeneration", "Others"),
    Architecture("persimmon", "PersimmonForCausalLM", "Others", "Persimmon"),
    Architecture("phi", "PhiForCausalLM", "Others", "Phi"),
    Architecture("phi3", "Phi3ForCausalLM", "Others", "Phi3"),
    Architecture(
        "phi4_multimodal",
        "Phi4MultimodalForCausalLM",
        "Others",
        "Phi4Multimodal Phi4MultimodalAudio Phi4MultimodalVision",
    ),
    Architecture("phimoe", "PhimoeForCausalLM", "Others", "Phimoe"),
    Architecture("pop2piano", "Pop2PianoForConditionalGeneration", "Others", "Pop2Piano"),
    Architecture("qianfan_ocr", "QianfanOCRForConditionalGeneration", "Others", "Qwen3"),
    Architecture("qwen2", "Qwen2ForCausalLM", "Qwen", "Qwen2"),
    Architecture(
        "qwen2_5_omni_thinker",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen",
        "Qwen2_5Omni Qwen2 Qwen2_5OmniVision",
    ),
    Architecture(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen",
        "Qwen2_5_VL Qwen2 Qwen2_5_VLVision",
    ),
    Architecture("qwen2_audio", "Qwen2AudioForConditionalGeneration", "Qwen", "Qwen2"),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen", "Qwen2Moe"),
    Architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen", "Qwen2VL Qwen2 Vision"),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen", "Qwen3"),
    Architecture("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen", "Qwen3_5 Qwen3_5Vision"),
    Architecture(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen", "Qwen3_5Moe Qwen3_5MoeVision"
    ),
    Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "Qwen", "Qwen3_5Moe"),
    Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen", "Qwen3_5"),
    Architecture("qwen3_asr", "Qwen3ASRForConditionalGeneration", "Qwen", "Qwen3"),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen", "Qwen3Moe"),
    Architecture("qwen3_next", "Qwen3NextForCausalLM", "Qwen", "Qwen3Next"),
    Architecture(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen",
        "Qwen3OmniMoe Qwen3OmniMoeThinker Qwen3OmniMoeVision",
    ),
    Architecture("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen", "Qwen3VL Qwen3VLVision"),
    Architecture(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen", "Qwen3VLMoe Qwen3VLMoeVision"
    ),
    Architecture(
        "qwen4_exp", "Qwen4ExpForConditionalGeneration", "Qwen", "Qwen4Exp Qwen4ExpVision"
    ),
    Architecture("qwen4_exp_text", "Qwen4ExpForCausalLM", "Qwen", "Qwen4Exp"),
    Architecture("recurrent_gemma", "RecurrentGemmaForCausalLM", "Gemma", "RecurrentGemma"),
    Architecture("reformer", "ReformerModelWithLMHead", "Others"),
    Architecture("rembert", "RemBertForCausalLM", "Others"),
    Architecture("roberta", "RobertaForCausalLM", "Others"),
    Architecture("roberta-prelayernorm", "RobertaPreLayerNormForCausalLM", "Others"),
    Architecture("roc_bert", "RoCBertForCausalLM", "Others"),
    Architecture("roformer", "RoFormerForCausalLM", "Others"),
    Architecture("rwkv", "RwkvForCausalLM", "Others"),
    Architecture("seamless_m4t", "SeamlessM4TForTextToText", "Others", "SeamlessM4T"),
    Architecture("seamless_m4t_v2", "SeamlessM4Tv2ForTextToText", "Others", "SeamlessM4Tv2"),
    Architecture("seed_oss", "SeedOssForCausalLM", "Others", "SeedOss"),
    Architecture("smollm3", "SmolLM3ForCausalLM", "Others", "SmolLM3"),
    Architecture("smolvlm", "SmolVLMForConditionalGeneration", "Others", "Llama"),
    Architecture("solar_open", "SolarOpenForCausalLM", "Others", "SolarOpen"),
    Architecture("stablelm", "StableLmForCausalLM", "Others", "StableLm"),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "Others", "Starcoder2"),
    Architecture("step3p7", "Step3p7ForConditionalGeneration", "Others", "Step3p7 Step3p7Vision"),
    Architecture(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "Others",
        "SwitchTransformers",
    ),
    Architecture("t5", "T5ForConditionalGeneration", "Others", "T5"),
    Architecture("t5gemma", "T5GemmaForConditionalGeneration", "Others", "T5Gemma"),
    Architecture(
        "t5gemma2", "T5Gemma2ForConditionalGeneration", "Others", "T5Gemma2 T5Gemma2Merged"
    ),
    Architecture("umt5", "UMT5ForConditionalGeneration", "Others", "UMT5"),
    Architecture("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", "Others", "UnlimitedOcr"),
    Architecture("vaultgemma", "VaultGemmaForCausalLM", "Gemma", "VaultGemma"),
    Architecture(
        "vibevoice",
        "VibeVoiceForConditionalGeneration",
        "Others",
        "Qwen2 VibeVoice VibeVoiceAcousticTokenizer",
    ),
    Architecture(
        "vibevoice_asr",
        "VibeVoiceAsrForConditionalGeneration",
        "Others",
        "Qwen2 VibeVoiceAsr VibeVoiceAcousticTokenizer",
    ),
    Architecture(
        "video_llama_3", "VideoLlama3ForConditionalGeneration", "Others", "Qwen2 VideoLlama3Vision"
    ),
    Architecture("video_llava", "VideoLlavaForConditionalGeneration", "Others", "Llama"),
    Architecture("vipllava", "VipLlavaForConditionalGeneration", "Others", "Llama"),
    Architecture("voxtral", "VoxtralForConditionalGeneration", "Others", "Llama"),
    Architecture("xglm", "XGLMForCausalLM", "Others"),
    Architecture("xlm-roberta", "XLMRobertaForCausalLM", "Others"),
    Architecture("xlm-roberta-xl", "XLMRobertaXLForCausalLM", "Others"),
    Architecture("xlstm", "xLSTMForCausalLM", "Others", "xLSTM"),
    Architecture("xmod", "XmodForCausalLM", "Others"),
    Architecture("youtu", "YoutuForCausalLM", "Others", "Youtu"),
    Architecture("zamba", "ZambaForCausalLM", "Others", "Zamba"),
    Architecture("zamba2", "Zamba2ForCausalLM", "Others", "Zamba2"),
    Architecture("zaya", "ZayaForCausalLM", "Others", "Zaya"),
)
