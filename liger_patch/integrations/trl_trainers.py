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
from typing import Any

from liger_patch.integrations.trl import OnKernels
from liger_patch.integrations.trl_head import Flag

# kind -> the module of its trainer in TRL, and the class here of what it does with the flag
TRAINERS = {
    "A2PO": ("trl.experimental.a2po", "trl_preferences.OfSequences"),
    "AsyncGRPO": ("trl.experimental.async_grpo", "trl.OnKernels"),
    "CPO": ("trl.experimental.cpo", "trl_preferences.OfAnswers"),
    "DPO": ("trl", "trl_trainers.WithReference"),
    "Distillation": ("trl", "trl_distillation.OfHeads"),
    "GKD": ("trl.experimental.gkd", "trl_distillation.OfLogits"),
    "GMPO": ("trl.experimental.gmpo", "trl.OnKernels"),
    "GRPO": ("trl", "trl_advantages.OfAdvantages"),
    "KTO": ("trl", "trl_trainers.WithReference"),
    "ORPO": ("trl.experimental.orpo", "trl_preferences.OfAnswersAndPrompts"),
    "OnlineDPO": ("trl.experimental.online_dpo", "trl_preferences.OfPairs"),
    "RLOO": ("trl", "trl_advantages.OfAdvantages"),
    "SDFT": ("trl.experimental.sdft", "trl_preferences.OfOneself"),
    "SDPO": ("trl.experimental.sdpo", "trl_preferences.OfOneself"),
    "TPO": ("trl.experimental.tpo", "trl_preferences.OfTriples"),
}


class WithReference(OnKernels):
    """DPO and KTO."""

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        """Compute the reference on the kernels too: the constructors call this."""
        self._patch()
        trls: Any = super()
        return trls._precompute_ref_logps(*arguments, **named)


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
