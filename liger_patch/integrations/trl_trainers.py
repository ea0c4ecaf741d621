"""TRL's trainers with one flag, as the ``SFTTrainer`` of ``trl.py``.

    from liger_patch.integrations.trl_trainers import DPOConfig, DPOTrainer
    DPOTrainer(model, args=DPOConfig(use_liger_patch=True, ...), ...)

With the flag, all models of a trainer run on the kernels of liger_patch from their first call on.
Losses and metrics stay TRL's. A configuration and a trainer of each of TRAINERS are made when they
are asked for: TRL takes seconds to import them.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_patch.integrations.trl import OnKernels
from liger_patch.integrations.trl_head import Flag, LogProbsCall
from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.patch.forward import record_of
from liger_patch.readers.wrapped_model import transformers_model

# kind -> the module of its trainer in TRL, and the class here of what it does with the flag
TRAINERS = {
    "A2PO": ("trl.experimental.a2po", "trl_preferences.OfSequences"),
    "AsyncGRPO": ("trl.experimental.async_grpo", "trl.OnKernels"),
    "CPO": ("trl.experimental.cpo", "trl_preferences.OfAnswers"),
    "DPO": ("trl", "trl_trainers.WithReference"),
    "Distillation": ("trl", "trl_distillation.OfHeads"),
    "GKD": ("trl.experimental.gkd", "trl_distillation.OfLogits"),
    "GMPO": ("trl.experimental.gmpo", "trl.OnKernels"),
    "GRPO": ("trl", "trl_trainers.OfAdvantages"),
    "KTO": ("trl", "trl_trainers.WithReference"),
    "ORPO": ("trl.experimental.orpo", "trl_preferences.OfAnswersAndPrompts"),
    "OnlineDPO": ("trl.experimental.online_dpo", "trl_preferences.OfPairs"),
    "RLOO": ("trl", "trl_trainers.OfAdvantages"),
    "SDFT": ("trl.experimental.sdft", "trl_preferences.OfOneself"),
    "SDPO": ("trl.experimental.sdpo", "trl_preferences.OfOneself"),
    "TPO": ("trl.experimental.tpo", "trl_preferences.OfTriples"),
}

OF_ANSWERS = "grpo", "sapo"  # GRPO's losses that are means over the tokens of each answer
OF_TOKENS = "bnpo", "cispo", "dapo", "dr_grpo", "luspo"  # sums over those of all answers


class WithReference(OnKernels):
    """DPO and KTO."""

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        """Compute the reference on the kernels too: the constructors call this."""
        self._patch()
        trls: Any = super()
        return trls._precompute_ref_logps(*arguments, **named)


class OfAdvantages(OnKernels):
    """GRPO and RLOO, whose head is told what their loss multiplies each log-probability by.

    In the first update after answers were generated, the policy is the one that wrote them. The
    loss then weighs their tokens by advantages, and a trained head takes three matrix products
    instead of four: see ``row_weights`` of ``linear_log_probs``. B: answers, K: tokens of each.
    """

    _has_old_bits = True  # whether the last first update had old log-probabilities bit by bit

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        trls, trainer = cast(Any, super()), cast(Any, self)
        if self._options is None or not torch.is_grad_enabled():
            return trls._compute_loss(model, inputs)
        target = transformers_model(trainer.accelerator.unwrap_model(model))
        record = record_of(target)
        call = None if record is None else record.fused_head_call
        if not isinstance(call, LogProbsCall):
            return trls._compute_loss(model, inputs)
        # RLOO's are of whole answers
        old = inputs.get("old_logps", inputs.get("old_per_token_logps"))
        is_first = self._is_first_update()
        if old is None or (is_first and self._has_old_bits):
            call.row_weights = self._row_weights(inputs, accumulation_dtype(target.dtype))
        try:
            loss = trls._compute_loss(model, inputs)
        finally:
            call.row_weights = None
        if old is not None and is_first:
            # other bits are another factor for each token: the guess would cost two products
            mask = inputs["completion_mask"]
            new, old = self._log_probs * mask, old if old.dim() == 1 else old * mask
            self._has_old_bits = torch.equal(new.sum(1) if old.dim() == 1 else new, old)
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        trls: Any = super()
        results = trls._get_per_token_logps_and_entropies(*arguments, **named)
        self._log_probs = results[0].detach()
        return results

    def _row_weights(self, inputs: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
        """Return (B, K), what the loss multiplies each answer token's log-probability by, up to one
        factor for all; None where that is not known.
        """
        trainer = cast(Any, self)
        advantages, mask = inputs["advantages"].to(dtype), inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        weights = (advantages[:, None] if advantages.dim() == 1 else advantages) * mask
        if "old_logps" in inputs:
            return weights  # RLOO's
        with_others = (
            trainer.beta != 0.0
            or trainer.top_entropy_quantile < 1.0
            or trainer.off_policy_mask_threshold is not None
            or trainer._entropy_bonus_enabled
        )
        if with_others or trainer.loss_type not in (*OF_ANSWERS, *OF_TOKENS):
            return None
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            if trainer.importance_sampling_level != "token":
                return None
            weights = weights * inputs["importance_sampling_ratio"]
        if trainer.loss_type in OF_ANSWERS:
            weights = weights / mask.sum(-1, keepdim=True).clamp(min=1)
        return weights

    def _is_first_update(self) -> bool:
        """Return whether no update has followed the generation of the answers."""
        trainer = cast(Any, self)
        args, step = trainer.args, trainer._step
        start = step - step % (args.steps_per_generation * trainer.num_iterations)
        each = args.gradient_accumulation_steps
        return step // each == start // each


def __getattr__(name: str) -> Any:
    kind = name.removesuffix("Config").removesuffix("Trainer")
    if kind == name or kind not in TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, (ours, on_kernels) = TRAINERS[kind][0], TRAINERS[kind][1].split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, of all that is experimental
        trls = getattr(importlib.import_module(module), name)
    own: dict[str, Any] = {"__module__": __name__}
    if name.endswith("Config"):
        own["__doc__"] = f"TRL's ``{name}`` with ``use_liger_patch``, for ``{kind}Trainer``."
        made = dataclass(type(name, (Flag, trls), own))
    else:
        own["__doc__"] = (
            f"TRL's ``{name}``; on kernels with ``{kind}Config(use_liger_patch=True)``."
        )
        base = getattr(importlib.import_module(f"liger_patch.integrations.{ours}"), on_kernels)
        made = type(name, (base, trls), own)
    globals()[name] = made  # one class, which pickles find again
    return made
