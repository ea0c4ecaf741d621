"""TRL's DPO, KTO, GRPO and RLOO trainers with one flag, as the ``SFTTrainer`` of ``trl.py``.

    from liger_patch.integrations.trl_trainers import DPOConfig, DPOTrainer
    DPOTrainer(model, args=DPOConfig(use_liger_patch=True, ...), ...)

With the flag, policy and reference run on the kernels of liger_patch from their first call on.
Losses and metrics stay TRL's.
"""

from __future__ import annotations

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

from liger_patch.integrations.trl import OnKernels
from liger_patch.integrations.trl_head import Flag


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


class _WithReference(OnKernels):
    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        """Compute the reference on the kernels too: DPO's and KTO's constructors call this."""
        self._patch()
        trls: Any = super()
        return trls._precompute_ref_logps(*arguments, **named)


class DPOTrainer(_WithReference, TrlDPOTrainer):
    """TRL's ``DPOTrainer``; with ``DPOConfig(use_liger_patch=True)``, on kernels."""


class KTOTrainer(_WithReference, TrlKTOTrainer):
    """TRL's ``KTOTrainer``; with ``KTOConfig(use_liger_patch=True)``, on kernels."""


class GRPOTrainer(OnKernels, TrlGRPOTrainer):
    """TRL's ``GRPOTrainer``; with ``GRPOConfig(use_liger_patch=True)``, on kernels."""


class RLOOTrainer(OnKernels, TrlRLOOTrainer):
    """TRL's ``RLOOTrainer``; with ``RLOOConfig(use_liger_patch=True)``, on kernels."""
