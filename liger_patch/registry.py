"""The architectures that apply_patch promises and that the tests cover: one row each, data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """One supported model class.

    model_type: `config.model_type` of the instance that is patched. A text model and the
        vision-language model around it have one each, so it names a row uniquely.
    class_name: the class with the language-model head, as `transformers` exports it.
    family: heading in the README's table: "Llama", "Gemma", "Qwen" or "Others".
    layers: how the names of its norm's, attention's and gated feed-forward layer's classes begin
        ("Llama": LlamaRMSNorm, LlamaAttention, LlamaMLP; "Llama4": Llama4TextRMSNorm), which have
        kernels; several beginnings are separated by spaces. "" where none has.
    """

    model_type: str
    class_name: str
    family: str
    layers: str = ""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("cohere", "CohereForCausalLM", "Others", "Cohere"),
    Architecture("cohere2", "Cohere2ForCausalLM", "Others", "Cohere2"),
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
    Architecture("glm4", "Glm4ForCausalLM", "Others", "Glm4"),
    Architecture("granite", "GraniteForCausalLM", "Others", "Granite"),
    Architecture("granitemoe", "GraniteMoeForCausalLM", "Others", "GraniteMoe"),
    Architecture("llama", "LlamaForCausalLM", "Llama", "Llama"),
    Architecture("llama4", "Llama4ForConditionalGeneration", "Llama", "Llama4"),
    Architecture("llama4_text", "Llama4ForCausalLM", "Llama", "Llama4"),
    Architecture("llava", "LlavaForConditionalGeneration", "Others", "Llama Mistral"),
    Architecture("ministral3", "Ministral3ForCausalLM", "Others", "Ministral3"),
    Architecture("mistral", "MistralForCausalLM", "Others", "Mistral"),
    Architecture("mistral3", "Mistral3ForConditionalGeneration", "Others", "Mistral Ministral3"),
    Architecture("mixtral", "MixtralForCausalLM", "Others", "Mixtral"),
    Architecture("mllama", "MllamaForConditionalGeneration", "Llama", "Mllama"),
    Architecture("mllama_text_model", "MllamaForCausalLM", "Llama", "Mllama"),
    Architecture("olmo2", "Olmo2ForCausalLM", "Others", "Olmo2"),
    Architecture("olmo3", "Olmo3ForCausalLM", "Others", "Olmo3"),
    Architecture("paligemma", "PaliGemmaForConditionalGeneration", "Gemma", "Gemma2 Gemma"),
    Architecture("phi", "PhiForCausalLM", "Others", "Phi"),
    Architecture("phi3", "Phi3ForCausalLM", "Others", "Phi3"),
    Architecture("qwen2", "Qwen2ForCausalLM", "Qwen", "Qwen2"),
    Architecture(
        "qwen2_5_omni_thinker",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen",
        "Qwen2_5Omni Qwen2",
    ),
    Architecture("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen", "Qwen2_5_VL Qwen2"),
    Architecture("qwen2_audio", "Qwen2AudioForConditionalGeneration", "Qwen", "Qwen2"),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen", "Qwen2Moe"),
    Architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen", "Qwen2VL Qwen2"),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen", "Qwen3"),
    Architecture("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen", "Qwen3_5"),
    Architecture("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen", "Qwen3_5Moe"),
    Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "Qwen", "Qwen3_5Moe"),
    Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen", "Qwen3_5"),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen", "Qwen3Moe"),
    Architecture("qwen3_next", "Qwen3NextForCausalLM", "Qwen", "Qwen3Next"),
    Architecture(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen",
        "Qwen3OmniMoe Qwen3OmniMoeThinker",
    ),
    Architecture("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen", "Qwen3VL"),
    Architecture("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen", "Qwen3VLMoe"),
    Architecture("qwen4_exp", "Qwen4ExpForConditionalGeneration", "Qwen", "Qwen4Exp"),
    Architecture("qwen4_exp_text", "Qwen4ExpForCausalLM", "Qwen", "Qwen4Exp"),
    Architecture("recurrent_gemma", "RecurrentGemmaForCausalLM", "Gemma", "RecurrentGemma"),
    Architecture("smollm3", "SmolLM3ForCausalLM", "Others", "SmolLM3"),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "Others", "Starcoder2"),
    Architecture("vaultgemma", "VaultGemmaForCausalLM", "Gemma", "VaultGemma"),
)


def find(model: PreTrainedModel) -> Architecture:
    """Return the row of `model`, whose class may be a subclass of the row's.

    Raises ValueError, naming every supported architecture, where there is none.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    class_names = {cls.__name__ for cls in type(model).__mro__}
    for row in ARCHITECTURES:
        if row.model_type == model_type and row.class_name in class_names:
            return row
    supported = "\n".join(f"  {row.model_type}: {row.class_name}" for row in ARCHITECTURES)
    raise ValueError(
        f"model is a {type(model).__name__} with config.model_type {model_type!r}, which has no "
        f"row in liger_patch.registry. Expected one of\n{supported}"
    )


def available() -> list[Architecture]:
    """Return the rows whose class the installed Transformers has."""
    exported = _exported_names()
    return [row for row in ARCHITECTURES if row.class_name in exported]


def missing() -> list[Architecture]:
    """Return the rows whose class the installed Transformers does not have."""
    exported = _exported_names()
    return [row for row in ARCHITECTURES if row.class_name not in exported]


def _exported_names() -> frozenset[str]:
    # The lazy module lists its names here; hasattr() would import each class's modeling file.
    return frozenset(vars(transformers)["__all__"])
