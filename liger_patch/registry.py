"""The architectures that the tests cover, one row each, and the row of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import transformers

from liger_patch.subclass import is_transformers, original_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# the lazy module lists its names here; hasattr() would import each class's modeling file
EXPORTED = frozenset(vars(transformers)["__all__"])
DENSE = "rms_norm rotary attention gated"


@dataclass(frozen=True)
class Architecture:
    """One tested model class.

    model_type: `config.model_type` of the instance that is patched. A text model and the
        vision-language model around it have one each, so it names a row uniquely.
    class_name: the class with the language-model head, as `transformers` exports it.
    kinds: of its layers on kernels, as `layers` of `apply_patch` names them; "" for none. A warning
        names those that are not found, but not "gated", "experts" and "delta_net".
    family: group in docs/models.md: "Llama", "Gemma", "Qwen" or "Others".
    """

    model_type: str
    class_name: str
    kinds: str = DENSE
    family: str = "Others"


PLAIN, NO_NORM = "rms_norm rotary attention", "rotary attention gated"
# kinds of mixtures, without feed-forward layers beside the routed experts, and with
ROUTED = "rms_norm rotary attention experts"
SHARED = "rms_norm rotary attention gated experts"
# kinds of models with recurrent layers, without a mixture and with
HYBRID = "rms_norm rotary attention gated recurrent"
SHARED_HYBRID = f"{SHARED} recurrent"
# where these are gated delta nets
LINEAR, SHARED_LINEAR = f"{HYBRID} delta_net", f"{SHARED_HYBRID} delta_net"


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("afmoe", "AfmoeForCausalLM", SHARED),
    Architecture("apertus", "ApertusForCausalLM", PLAIN),
    Architecture("arcee", "ArceeForCausalLM", PLAIN),
    Architecture("aria", "AriaForConditionalGeneration", SHARED),
    Architecture("aria_text", "AriaTextForCausalLM", SHARED),
    Architecture("audioflamingo3", "AudioFlamingo3ForConditionalGeneration"),
    Architecture("axk1", "AXK1ForCausalLM", SHARED),
    Architecture("axk2", "AXK2ForCausalLM", SHARED),
    Architecture("aya_vision", "AyaVisionForConditionalGeneration", NO_NORM),
    Architecture("bailing_hybrid", "BailingHybridForCausalLM", SHARED_HYBRID),
    Architecture("bamba", "BambaForCausalLM", HYBRID),
    Architecture("beam", "BeamForCausalLM", SHARED),
    Architecture("bert", "BertLMHeadModel", ""),
    Architecture("bert-generation", "BertGenerationDecoder", ""),
    Architecture("big_bird", "BigBirdForCausalLM", ""),
    Architecture("biogpt", "BioGptForCausalLM", "attention"),
    Architecture("bitnet", "BitNetForCausalLM", PLAIN),
    Architecture("blip_text_model", "BlipTextLMHeadModel", ""),
    Architecture("bloom", "BloomForCausalLM", ""),
    Architecture("blt", "BltForCausalLM", "rms_norm attention gated"),
    Architecture("camembert", "CamembertForCausalLM", ""),
    Architecture("codegen", "CodeGenForCausalLM", "attention"),
    Architecture("cohere", "CohereForCausalLM", NO_NORM),
    Architecture("cohere2", "Cohere2ForCausalLM", NO_NORM),
    Architecture("cohere2_moe", "Cohere2MoeForCausalLM", "rotary attention experts"),
    Architecture("cohere2_vision", "Cohere2VisionForConditionalGeneration", NO_NORM),
    Architecture("cohere_compass", "CohereCompassForConditionalGeneration", NO_NORM),
    Architecture("cohere_compass_text", "CohereCompassForCausalLM", NO_NORM),
    Architecture("cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", PLAIN),
    Architecture("cosmos3_omni", "Cosmos3OmniForConditionalGeneration"),
    Architecture("ctrl", "CTRLLMHeadModel", "attention"),
    Architecture("cwm", "CwmForCausalLM"),
    Architecture("data2vec-text", "Data2VecTextForCausalLM", ""),
    Architecture("dbrx", "DbrxForCausalLM", "rotary attention"),
    Architecture("deepseek_v2", "DeepseekV2ForCausalLM", SHARED),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", SHARED),
    Architecture("deepseek_v32", "DeepseekV32ForCausalLM", SHARED),
    Architecture("deepseek_v4", "DeepseekV4ForCausalLM", "rms_norm attention experts"),
    Architecture("deepseek_vl", "DeepseekVLForConditionalGeneration"),
    Architecture("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration"),
    Architecture("diffllama", "DiffLlamaForCausalLM"),
    Architecture("doge", "DogeForCausalLM", "rms_norm rotary gated"),
    Architecture("dots1", "Dots1ForCausalLM", SHARED),
    Architecture("dots3_note_text", "Dots3NoteForCausalLM", SHARED),
    Architecture("electra", "ElectraForCausalLM", ""),
    Architecture("emu3", "Emu3ForConditionalGeneration"),
    Architecture("emu3_text_model", "Emu3ForCausalLM"),
    Architecture("ernie", "ErnieForCausalLM", ""),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", SHARED),
    Architecture("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", SHARED),
    Architecture("evolla", "EvollaForProteinText2Text"),
    Architecture("exaone4", "Exaone4ForCausalLM"),
    Architecture("exaone4_5", "Exaone4_5_ForConditionalGeneration"),
    Architecture("exaone_moe", "ExaoneMoeForCausalLM", SHARED),
    Architecture("falcon", "FalconForCausalLM", "rotary"),
    Architecture("falcon_h1", "FalconH1ForCausalLM", "rms_norm rotary attention recurrent"),
    Architecture("falcon_mamba", "FalconMambaForCausalLM", "rms_norm"),
    Architecture("flex_olmo", "FlexOlmoForCausalLM", ROUTED),
    Architecture("flint", "FlintForCausalLM", SHARED),
    Architecture("fuyu", "FuyuForCausalLM", "rotary attention"),
    Architecture("gemma", "GemmaForCausalLM", DENSE, "Gemma"),
    Architecture("gemma2", "Gemma2ForCausalLM", DENSE, "Gemma"),
    Architecture("gemma3", "Gemma3ForConditionalGeneration", DENSE, "Gemma"),
    Architecture("gemma3_text", "Gemma3ForCausalLM", DENSE, "Gemma"),
    Architecture("gemma3n", "Gemma3nForConditionalGeneration", DENSE, "Gemma"),
    Architecture("gemma3n_text", "Gemma3nForCausalLM", DENSE, "Gemma"),
    Architecture("gemma4", "Gemma4ForConditionalGeneration", DENSE, "Gemma"),
    Architecture("gemma4_text", "Gemma4ForCausalLM", DENSE, "Gemma"),
    Architecture("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", DENSE, "Gemma"),
    Architecture("gemma4_unified_text", "Gemma4UnifiedForCausalLM", DENSE, "Gemma"),
    Architecture("glm", "GlmForCausalLM"),
    Architecture("glm4", "Glm4ForCausalLM"),
    Architecture("glm46v", "Glm46VForConditionalGeneration"),
    Architecture("glm4_moe", "Glm4MoeForCausalLM", SHARED),
    Architecture("glm4_moe_lite", "Glm4MoeLiteForCausalLM", SHARED),
    Architecture("glm4v", "Glm4vForConditionalGeneration"),
    Architecture("glm4v_moe", "Glm4vMoeForConditionalGeneration", SHARED),
    Architecture("glm_moe_dsa", "GlmMoeDsaForCausalLM", SHARED),
    Architecture("glm_ocr", "GlmOcrForConditionalGeneration"),
    Architecture("glmasr", "GlmAsrForConditionalGeneration"),
    Architecture("got_ocr2", "GotOcr2ForConditionalGeneration"),
    Architecture("gpt2", "GPT2LMHeadModel", "attention"),
    Architecture("gpt_bigcode", "GPTBigCodeForCausalLM", "attention"),
    Architecture("gpt_neo", "GPTNeoForCausalLM", ""),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "rotary attention"),
    Architecture("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "rotary"),
    Architecture("gpt_oss", "GptOssForCausalLM", ROUTED),
    Architecture("gptj", "GPTJForCausalLM", "attention"),
    Architecture("granite", "GraniteForCausalLM"),
    Architecture("granite_docling", "GraniteDoclingForConditionalGeneration"),
    Architecture("granite_speech", "GraniteSpeechForConditionalGeneration"),
    Architecture("granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration"),
    Architecture("granite_swa", "GraniteSWAForCausalLM"),
    Architecture("granitemoe", "GraniteMoeForCausalLM", ROUTED),
    Architecture("granitemoe_swa", "GraniteMoeSWAForCausalLM", ROUTED),
    Architecture("granitemoehybrid", "GraniteMoeHybridForCausalLM", SHARED_HYBRID),
    Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", ROUTED),
    Architecture("helium", "HeliumForCausalLM"),
    Architecture("hrm_text", "HrmTextForCausalLM"),
    Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", SHARED),
    Architecture("hy_v3", "HYV3ForCausalLM", SHARED),
    Architecture("hy_v4", "HYV4ForCausalLM", SHARED),
    Architecture("hyperclovax", "HyperCLOVAXForCausalLM"),
    Architecture("hyperclovax_vision_v2", "HyperCLOVAXVisionV2ForConditionalGeneration"),
    Architecture("idefics2", "Idefics2ForConditionalGeneration"),
    Architecture("idefics3", "Idefics3ForConditionalGeneration"),
    Architecture("inkling_text", "InklingForCausalLM", "rms_norm attention experts"),
    Architecture("internvl", "InternVLForConditionalGeneration"),
    Architecture("jais2", "Jais2ForCausalLM", "rotary attention"),
    Architecture("jamba", "JambaForCausalLM", "rms_norm attention gated experts"),
    Architecture("janus", "JanusForConditionalGeneration"),
    Architecture("jetmoe", "JetMoeForCausalLM", PLAIN),
    Architecture("kimi_k25", "Kimi_K25ForConditionalGeneration", SHARED),
    Architecture(
        "kimi_linear", "KimiLinearForCausalLM", "rms_norm attention gated experts recurrent"
    ),
    Architecture("kolibri1", "Kolibri1ForCausalLM", SHARED),
    Architecture("kosmos-2.5", "Kosmos2_5ForConditionalGeneration", "rms_norm attention"),
    Architecture("laguna", "LagunaForCausalLM", SHARED),
    Architecture("lfm2", "Lfm2ForCausalLM", PLAIN),
    Architecture("lfm2_moe", "Lfm2MoeForCausalLM", "rms_norm rotary attention experts recurrent"),
    Architecture("lfm2_vl", "Lfm2VlForConditionalGeneration", PLAIN),
    Architecture("lfm3", "Lfm3ForCausalLM", f"{PLAIN} recurrent"),
    Architecture("lfm3_vl", "Lfm3VlForConditionalGeneration", f"{PLAIN} recurrent"),
    Architecture("lighton_ocr", "LightOnOcrForConditionalGeneration"),
    Architecture("llama", "LlamaForCausalLM", DENSE, "Llama"),
    Architecture("llama4", "Llama4ForConditionalGeneration", DENSE, "Llama"),
    Architecture("llama4_text", "Llama4ForCausalLM", DENSE, "Llama"),
    Architecture("llava", "LlavaForConditionalGeneration"),
    Architecture("llava_next", "LlavaNextForConditionalGeneration"),
    Architecture("llava_next_video", "LlavaNextVideoForConditionalGeneration"),
    Architecture("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
    Architecture("longcat_flash", "LongcatFlashForCausalLM"),
    Architecture("longt5", "LongT5ForConditionalGeneration", "rms_norm attention"),
    Architecture("m2m_100", "M2M100ForConditionalGeneration", "attention"),
    Architecture("mamba", "MambaForCausalLM", "rms_norm"),
    Architecture("mamba2", "Mamba2ForCausalLM", "rms_norm"),
    Architecture("megatron-bert", "MegatronBertForCausalLM", ""),
    Architecture("mellum", "MellumForCausalLM", ROUTED),
    Architecture("mimo_v2_flash", "MiMoV2FlashForCausalLM", SHARED),
    Architecture("minicpm3", "MiniCPM3ForCausalLM"),
    Architecture("minicpm_ocr", "MiniCPMOcrForConditionalGeneration", LINEAR),
    Architecture("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", LINEAR),
    Architecture("minicpmv4_7", "MiniCPMV4_7ForConditionalGeneration", LINEAR),
    Architecture("minimax", "MiniMaxForCausalLM", ROUTED),
    Architecture("minimax_m2", "MiniMaxM2ForCausalLM", ROUTED),
    Architecture("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", ROUTED),
    Architecture("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", ROUTED),
    Architecture("ministral", "MinistralForCausalLM"),
    Architecture("ministral3", "Ministral3ForCausalLM"),
    Architecture("mistral", "MistralForCausalLM"),
    Architecture("mistral3", "Mistral3ForConditionalGeneration"),
    Architecture("mistral4", "Mistral4ForCausalLM", SHARED),
    Architecture("mistral_large4", "MistralLarge4ForConditionalGeneration", SHARED),
    Architecture("mixtral", "MixtralForCausalLM", ROUTED),
    Architecture("mllama", "MllamaForConditionalGeneration", DENSE, "Llama"),
    Architecture("mllama_text_model", "MllamaForCausalLM", DENSE, "Llama"),
    Architecture("modernbert-decoder", "ModernBertDecoderForCausalLM", "rotary attention"),
    Architecture("moshi", "MoshiForCausalLM", PLAIN),
    Architecture("moss_transcribe_diarize", "MossTranscribeDiarizeForConditionalGeneration"),
    Architecture("mpt", "MptForCausalLM", ""),
    Architecture("mt5", "MT5ForConditionalGeneration", "rms_norm attention"),
    Architecture("muse_glimmer", "MuseGlimmerForConditionalGeneration"),
    Architecture("musicflamingo", "MusicFlamingoForConditionalGeneration"),
    Architecture("nanochat", "NanoChatForCausalLM", PLAIN),
    Architecture("nemotron", "NemotronForCausalLM", "rotary attention"),
    Architecture("nemotron_h", "NemotronHForCausalLM", "rms_norm attention recurrent"),
    Architecture("olmo", "OlmoForCausalLM", NO_NORM),
    Architecture("olmo2", "Olmo2ForCausalLM"),
    Architecture("olmo3", "Olmo3ForCausalLM"),
    Architecture("olmo_hybrid", "OlmoHybridForCausalLM", LINEAR),
    Architecture("olmoe", "OlmoeForCausalLM", ROUTED),
    Architecture("openai-gpt", "OpenAIGPTLMHeadModel", ""),
    Architecture("opt", "OPTForCausalLM", "attention"),
    Architecture("ovis2", "Ovis2ForConditionalGeneration"),
    Architecture("paddleocr_vl", "PaddleOCRVLForConditionalGeneration"),
    Architecture(
        "paligemma", "PaliGemmaForConditionalGeneration", "rms_norm rotary gated", "Gemma"
    ),
    Architecture("pegasus_x", "PegasusXForConditionalGeneration", ""),
    Architecture("persimmon", "PersimmonForCausalLM", "rotary attention"),
    Architecture("phi", "PhiForCausalLM", "rotary attention"),
    Architecture("phi3", "Phi3ForCausalLM"),
    Architecture("phi4_multimodal", "Phi4MultimodalForCausalLM"),
    Architecture("phimoe", "PhimoeForCausalLM", "rotary attention experts"),
    Architecture("pop2piano", "Pop2PianoForConditionalGeneration", "rms_norm attention"),
    Architecture("qianfan_ocr", "QianfanOCRForConditionalGeneration"),
    Architecture("qwen2", "Qwen2ForCausalLM", DENSE, "Qwen"),
    Architecture(
        "qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", DENSE, "Qwen"
    ),
    Architecture("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", DENSE, "Qwen"),
    Architecture("qwen2_audio", "Qwen2AudioForConditionalGeneration", DENSE, "Qwen"),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", SHARED, "Qwen"),
    Architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", DENSE, "Qwen"),
    Architecture("qwen3", "Qwen3ForCausalLM", DENSE, "Qwen"),
    Architecture("qwen3_5", "Qwen3_5ForConditionalGeneration", LINEAR, "Qwen"),
    Architecture("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", SHARED_LINEAR, "Qwen"),
    Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", SHARED_LINEAR, "Qwen"),
    Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", LINEAR, "Qwen"),
    Architecture("qwen3_asr", "Qwen3ASRForConditionalGeneration", DENSE, "Qwen"),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", ROUTED, "Qwen"),
    Architecture("qwen3_next", "Qwen3NextForCausalLM", SHARED_LINEAR, "Qwen"),
    Architecture(
        "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", ROUTED, "Qwen"
    ),
    Architecture("qwen3_vl", "Qwen3VLForConditionalGeneration", DENSE, "Qwen"),
    Architecture("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", ROUTED, "Qwen"),
    Architecture("qwen4_exp", "Qwen4ExpForConditionalGeneration", SHARED_LINEAR, "Qwen"),
    Architecture("qwen4_exp_text", "Qwen4ExpForCausalLM", SHARED_LINEAR, "Qwen"),
    Architecture("recurrent_gemma", "RecurrentGemmaForCausalLM", DENSE, "Gemma"),
    Architecture("reformer", "ReformerModelWithLMHead", ""),
    Architecture("rembert", "RemBertForCausalLM", ""),
    Architecture("roberta", "RobertaForCausalLM", ""),
    Architecture("roberta-prelayernorm", "RobertaPreLayerNormForCausalLM", ""),
    Architecture("roc_bert", "RoCBertForCausalLM", ""),
    Architecture("roformer", "RoFormerForCausalLM", ""),
    Architecture("rwkv", "RwkvForCausalLM", ""),
    Architecture("seamless_m4t", "SeamlessM4TForTextToText", "attention"),
    Architecture("seamless_m4t_v2", "SeamlessM4Tv2ForTextToText", "attention"),
    Architecture("seed_oss", "SeedOssForCausalLM", PLAIN),
    Architecture("smollm3", "SmolLM3ForCausalLM"),
    Architecture("smolvlm", "SmolVLMForConditionalGeneration"),
    Architecture("solar_open", "SolarOpenForCausalLM", SHARED),
    Architecture("stablelm", "StableLmForCausalLM", NO_NORM),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "rotary attention"),
    Architecture("step3p7", "Step3p7ForConditionalGeneration", PLAIN),
    Architecture(
        "switch_transformers", "SwitchTransformersForConditionalGeneration", "rms_norm attention"
    ),
    Architecture("t5", "T5ForConditionalGeneration", "rms_norm attention"),
    Architecture("t5gemma", "T5GemmaForConditionalGeneration", PLAIN),
    Architecture("t5gemma2", "T5Gemma2ForConditionalGeneration", "rms_norm rotary"),
    Architecture("umt5", "UMT5ForConditionalGeneration", "rms_norm attention"),
    Architecture("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", SHARED),
    Architecture("vaultgemma", "VaultGemmaForCausalLM", DENSE, "Gemma"),
    Architecture("vibevoice", "VibeVoiceForConditionalGeneration"),
    Architecture("vibevoice_asr", "VibeVoiceAsrForConditionalGeneration"),
    Architecture("video_llama_3", "VideoLlama3ForConditionalGeneration"),
    Architecture("video_llava", "VideoLlavaForConditionalGeneration"),
    Architecture("vipllava", "VipLlavaForConditionalGeneration"),
    Architecture("voxtral", "VoxtralForConditionalGeneration"),
    Architecture("xglm", "XGLMForCausalLM", ""),
    Architecture("xlm-roberta", "XLMRobertaForCausalLM", ""),
    Architecture("xlm-roberta-xl", "XLMRobertaXLForCausalLM", ""),
    Architecture("xlstm", "xLSTMForCausalLM", "rms_norm"),
    Architecture("xmod", "XmodForCausalLM", ""),
    Architecture("youtu", "YoutuForCausalLM"),
    Architecture("zamba", "ZambaForCausalLM", "rms_norm attention gated recurrent"),
    Architecture("zamba2", "Zamba2ForCausalLM", f"{PLAIN} recurrent"),
    Architecture("zaya", "ZayaForCausalLM", ROUTED),
)


def row_of(model: PreTrainedModel) -> Architecture | None:
    """Return the row of `model`, whose class may be a subclass of the row's; None without one."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    class_names = {cls.__name__ for cls in type(model).__mro__}
    for row in ARCHITECTURES:
        if row.model_type == model_type and row.class_name in class_names:
            return row
    return None


def is_tested(model: PreTrainedModel) -> bool:
    """Return whether `model` has a row, and its class runs Transformers' own forward: no row says
    what another forward does with its labels.
    """
    return row_of(model) is not None and not _has_own_forward(model)


def find(model: PreTrainedModel) -> Architecture:
    """Return the row of `model`.

    Raises ValueError where there is none, or where the class of `model` has a forward of its own.
    """
    row = row_of(model)
    if row is not None and not _has_own_forward(model):
        return row
    why = (
        "which has no row in liger_patch.registry: docs/models.md and "
        "liger_patch.registry.available() list all"
        if row is None
        else f"whose forward is not that of Transformers: the row of {row.class_name} in "
        "liger_patch.registry does not cover it"
    )
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    raise ValueError(
        f"model is a {type(model).__name__} with config.model_type {model_type!r}, {why}"
    )


def available() -> list[Architecture]:
    """Return the rows whose class the installed Transformers has."""
    return [row for row in ARCHITECTURES if row.class_name in EXPORTED]


def missing() -> list[Architecture]:
    """Return the rows whose class the installed Transformers does not have."""
    return [row for row in ARCHITECTURES if row.class_name not in EXPORTED]


def _has_own_forward(model: PreTrainedModel) -> bool:
    """Return whether the class of the model, before it was patched, has another forward than
    Transformers'.
    """
    cls = original_class(model)
    return not is_transformers(getattr(cls, "forward", None))
