"""Fused linear + cross-entropy for Hugging Face Transformers: training without the logits."""

from liger_patch.apply import apply_patch, revert_patch
from liger_patch.distillation import distillation_loss
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.head.inputs import VocabShard
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_distillation import linear_distillation
from liger_patch.kernels.linear_log_probs import LogProbs, linear_log_probs
from liger_patch.layers.quantized_base import quantize_base
from liger_patch.layers.quantized_experts import quantize_experts
from liger_patch.patch.forward import deferred_logits
from liger_patch.status import PatchStatus, patch_status

__all__ = [
    "LogProbs",
    "PatchStatus",
    "VocabShard",
    "apply_patch",
    "cross_entropy",
    "deferred_logits",
    "distillation_loss",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "patch_status",
    "quantize_base",
    "quantize_experts",
    "revert_patch",
]
__version__ = "0.1.0"
