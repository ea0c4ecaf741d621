"""TRL's experimental ORPO and CPO (SimPO) trainers, without the logits of both answers.

    from liger_patch.integrations.trl_preferences import CPOConfig, CPOTrainer
    CPOTrainer(model, args=CPOConfig(use_liger_patch=True, loss_type="simpo", ...), ...)

These trainers have no fused head: they take the logits of a batch and compute log-probabilities,
a likelihood and means of logits from them. Here ``linear_log_probs`` computes these, for all
positions: TRL's metrics ``logits/*`` are means over prompts and padding too. Losses and metrics
stay TRL's. B: pairs, T: tokens of the longest answer with its prompt.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_patch.integrations.trl import OnKernels, patch_for_log_probs
from liger_patch.integrations.trl_head import Flag, is_flagged
from liger_patch.patch import flags
from liger_patch.patch.packing import IGNORE_INDEX

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL's, of all that is experimental
    from trl.experimental import cpo, orpo

if TYPE_CHECKING:
    from transformers import Trainer as TransformersTrainer
else:
    TransformersTrainer = object


@dataclass
class ORPOConfig(Flag, orpo.ORPOConfig):
    """TRL's ``ORPOConfig`` with ``use_liger_patch``, for ``ORPOTrainer`` of this module."""


@dataclass
class CPOConfig(Flag, cpo.CPOConfig):
    """TRL's ``CPOConfig`` with ``use_liger_patch``, for ``CPOTrainer`` of this module."""


class _WithoutLogits(OnKernels, ABC, TransformersTrainer):
    """What both trainers do with the flag. Without it they are TRL's to the last call."""

    is_encoder_decoder: bool

    def _patch_model(self, name: str, model: nn.Module, **options: Any) -> None:
        if not self.is_encoder_decoder:
            patch_for_log_probs(model, ("log_probs", "mean_logits"), **options)

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return TRL's numbers of the chosen and the rejected answers."""
        trls: Any = super()
        if not is_flagged(self.args) or self.is_encoder_decoder or flags.return_logits() is True:
            return trls.concatenated_forward(model, batch)
        trainer: Any = self
        inputs = trainer.concatenated_inputs(
            batch, padding_value=self._padding(), device=self.accelerator.device
        )
        ids, mask = inputs["concatenated_input_ids"], inputs["concatenated_attention_mask"]
        routers = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
        next_ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
        output = model(
            ids, attention_mask=mask, shift_labels=next_ids, fused_lm_head=True, **routers
        )
        if output is None:  # the head cannot be fused, and a warning has said why
            return trls.concatenated_forward(model, batch)
        answers = inputs["concatenated_labels"]
        chosen = len(batch["chosen_labels"])
        log_probs, means = output.log_probs[:, :-1], output.mean_logits
        log_p = _of_answers(log_probs, answers, self._is_averaged())
        likelihood = self._likelihood(log_probs[:chosen], ids[:chosen], mask[:chosen], answers)
        means = means[:, : self._positions(means.shape[1])]
        found = log_p[:chosen], log_p[chosen:], means[:chosen], means[chosen:], likelihood
        return (*found, output.aux_loss) if trainer.aux_loss_enabled else found

    @abstractmethod
    def _padding(self) -> int:
        """Return the token that pads the batch."""

    @abstractmethod
    def _is_averaged(self) -> bool:
        """Return whether an answer's log-probabilities are averaged, not summed."""

    @abstractmethod
    def _positions(self, tokens: int) -> int:
        """Return over how many positions TRL averages the logits."""

    @abstractmethod
    def _likelihood(self, log_probs: Tensor, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        """Return TRL's negative log-likelihood of the chosen rows."""


class ORPOTrainer(_WithoutLogits, orpo.ORPOTrainer):
    """TRL's ``ORPOTrainer``; with ``ORPOConfig(use_liger_patch=True)``, without logits."""

    def _padding(self) -> int:
        padding: Any = self.padding_value
        return padding

    def _is_averaged(self) -> bool:
        return True

    def _positions(self, tokens: int) -> int:
        return tokens - 1

    def _likelihood(self, log_probs: Tensor, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        return _mean_loss(log_probs, torch.where(mask == 1, ids, IGNORE_INDEX))  # of prompts too


class CPOTrainer(_WithoutLogits, cpo.CPOTrainer):
    """TRL's ``CPOTrainer``; with ``CPOConfig(use_liger_patch=True)``, without logits."""

    def _padding(self) -> int:
        padding: Any = self.pad_token_id
        return padding

    def _is_averaged(self) -> bool:
        return self.loss_type in ("ipo", "simpo")

    def _positions(self, tokens: int) -> int:
        return tokens

    def _likelihood(self, log_probs: Tensor, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        if self.cpo_alpha == 0:
            return torch.zeros((), device=log_probs.device)
        return _mean_loss(log_probs, answers[: len(log_probs)])


def _of_answers(
    log_probs: Tensor,  # (2 B, T - 1)
    labels: Tensor,  # (2 B, T)
    averaged: bool,
) -> Tensor:
    """Return (2 B,), the sum or the mean of each answer's log-probabilities."""
    supervised = labels[:, 1:] != IGNORE_INDEX
    total = (log_probs * supervised).sum(-1)
    return total / supervised.sum(-1) if averaged else total


def _mean_loss(log_probs: Tensor, labels: Tensor) -> Tensor:
    supervised = labels[:, 1:] != IGNORE_INDEX
    return -(log_probs * supervised).sum() / supervised.sum()
