"""TRL's DPO, KTO, GRPO and RLOO trainers with one flag, as the ``SFTTrainer`` of ``trl.py``.

    from liger_patch.integrations.trl_trainers import DPOConfig, DPOTrainer
    DPOTrainer(model, args=DPOConfig(use_liger_patch=True, ...), ...)

With the flag, policy and reference run on the kernels of liger_patch from their first call on.
Losses and metrics stay TRL's.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from trl.trainer.dpo_config import DPOConfig as TrlDPOConfig
from trl.trainer.dpo_trainer import DPOTrainer as TrlDPOTrainer
from trl.trainer.grpo_config import GRPOConfig as TrlGRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as TrlGRPOTrainer
from trl.trainer.kto_config import KTOConfig as TrlKTOConfig
from trl.trainer.kto_trainer import KTOTrainer as TrlKTOTrainer
from trl.trainer.rloo_config import RLOOConfig as TrlRLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer as TrlRLOOTrainer

from liger_patch.integrations.trl import apply_trl_patch, patched_on_error, revert_for_trl
from liger_patch.integrations.trl_head import Flag, is_flagged

MODELS = ("model", "ref_model")


@dataclass
class DPOConfig(Flag, TrlDPOConfig):
    """TRL's ``DPOConfig`` with ``use_liger_patch``, for ``DPOTrainer`` of this module."""


@dataclass
class KTOConfig(Flag, TrlKTOConfig):
    """TRL's ``KTOConfig`` with ``use_liger_patch``, for ``KTOTrainer`` of this module."""


@dataclass
class GRPOConfig(Flag, TrlGRPOConfig):
    """TRL's ``GRPOConfig`` with ``use_liger_patch``, for ``GRPOTrainer`` of this module."""


@dataclass
class RLOOConfig(Flag, TrlRLOOConfig):
    """TRL's ``RLOOConfig`` with ``use_liger_patch``, for ``RLOOTrainer`` of this module."""


class _OnKernels:
    """What all four trainers do with the flag. Without the flag they behave as TRL's.

    Raises:
        ValueError: the flag is set, and ``apply_patch`` gave a model options that TRL's losses do
            not have; or, with LIGER_PATCH_STRICT=1, its architecture has no row in the registry.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        construct: Any = super().__init__
        given = inspect.signature(construct).bind(*arguments, **named).arguments
        self._options: dict[str, dict[str, Any]] | None = None
        if not is_flagged(given.get("args")):
            construct(*arguments, **named)
            return
        self._options = {
            name: revert_for_trl(given[name])
            for name in MODELS
            if given.get(name) is not None and not isinstance(given[name], str)
        }
        reverted = [(given[name], options) for name, options in self._options.items()]
        with patched_on_error(*reverted):
            construct(*arguments, **named)
        self._patch()

    def _patch(self) -> None:
        options = self._options
        if options is None:
            return
        for name in MODELS:
            model = getattr(self, name, None)
            if model is not None:  # TRL may have made the reference itself
                apply_trl_patch(model, **options.get(name, options.get("model", {})))

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        """Compute the reference on the kernels too: DPO's and KTO's constructors call this."""
        self._patch()
        trls: Any = super()
        return trls._precompute_ref_logps(*arguments, **named)


class DPOTrainer(_OnKernels, TrlDPOTrainer):
    """TRL's ``DPOTrainer``; with ``DPOConfig(use_liger_patch=True)``, on kernels."""


class KTOTrainer(_OnKernels, TrlKTOTrainer):
    """TRL's ``KTOTrainer``; with ``KTOConfig(use_liger_patch=True)``, on kernels."""


class GRPOTrainer(_OnKernels, TrlGRPOTrainer):
    """TRL's ``GRPOTrainer``; with ``GRPOConfig(use_liger_patch=True)``, on kernels."""


class RLOOTrainer(_OnKernels, TrlRLOOTrainer):
    """TRL's ``RLOOTrainer``; with ``RLOOConfig(use_liger_patch=True)``, on kernels."""
