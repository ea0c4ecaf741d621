"""TRL's DistillationTrainer and experimental GKDTrainer, without the logits of student and teacher.

    from liger_patch.integrations.trl_trainers import DistillationConfig, DistillationTrainer
    DistillationTrainer(model, teacher, args=DistillationConfig(use_liger_patch=True, ...), ...)

With the flag, both models run on the kernels of liger_patch, and ``linear_distillation`` computes
the divergence. Losses and metrics stay TRL's.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, cast

import torch
import trl
from torch import Tensor, nn
from trl.trainer import distillation_trainer

from liger_patch.apply import apply_patch
from liger_patch.deferred.engines import is_partitioned
from liger_patch.deferred.tensor_parallel import is_dtensor
from liger_patch.distillation import distillation_loss
from liger_patch.integrations.trl import OnKernels
from liger_patch.integrations.trl_head import LEFT_TO_TRL, SUPPORTED
from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.linear_distillation import linear_distillation
from liger_patch.patch import flags
from liger_patch.patch.forward import deferred_logits, record_of
from liger_patch.patch.packing import IGNORE_INDEX
from liger_patch.patch.settings import LOGITS_ASKED, PatchRecord
from liger_patch.readers.wrapped_model import transformers_model

TRLS_LOSS = "_chunked_divergence_loss"  # that DistillationTrainer hands hidden states and heads

if TRLS_LOSS not in distillation_trainer.DistillationTrainer._compute_loss.__code__.co_names:
    raise ImportError(f"liger_patch supports {SUPPORTED}, got trl {trl.__version__}")


class OfHeads(OnKernels):
    """DistillationTrainer.

    TRL's own method finds the hidden states of the completions and both heads. It runs here with
    another function in the place of the one that it hands them to.
    """

    def _patch_model(self, name: str, model: nn.Module, **options: Any) -> None:
        apply_patch(model, **options)

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        given = unwrapped_student, inputs, num_items_in_batch
        record = record_of(transformers_model(unwrapped_student))
        trls: Any = super()
        function = trls._compute_loss.__func__
        if self._options is None or record is None:  # without the flag, or reverted
            return function(self, *given)
        names = {**function.__globals__, TRLS_LOSS: functools.partial(_divergence, record)}
        return FunctionType(function.__code__, names)(self, *given)


def _divergence(
    record: PatchRecord,
    student: Tensor,  # (B, K, H)
    teacher: Tensor,  # (B, K, H2)
    student_weight: Tensor,
    teacher_weight: Tensor,
    mask: Tensor,  # (B, K), 0 where a token does not count
    beta: float,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what TRL's function of these arguments does: the loss, the sum of the student's
    entropies, and the number of tokens that count.
    """
    reason = LOGITS_ASKED if flags.return_logits() is True else None
    for weight in (student_weight, teacher_weight):
        reason = reason or _why_left_to_trl(weight)
    record.note(reason, LEFT_TO_TRL)
    if reason is not None:
        trls = getattr(distillation_trainer, TRLS_LOSS)
        return trls(student, teacher, student_weight, teacher_weight, mask, beta, **how)
    labels = torch.where(mask.reshape(-1) != 0, 0, IGNORE_INDEX)
    entropies = torch.empty_like(labels, dtype=accumulation_dtype(student.dtype))
    record.before_loss()
    loss = linear_distillation(
        student.flatten(0, 1),
        _whole(student_weight, student.dtype),
        teacher.flatten(0, 1),
        _whole(teacher_weight, teacher.dtype),
        labels,
        divergence="jsd",
        beta=beta,
        temperature=how["temperature"],
        bias=_whole(how["student_lm_head_bias"], student.dtype),
        softcap=how["student_final_logit_softcapping"],
        logit_scale=how["student_logit_scale"],
        teacher_bias=_whole(how["teacher_lm_head_bias"], teacher.dtype),
        teacher_softcap=how["teacher_final_logit_softcapping"],
        teacher_logit_scale=how["teacher_logit_scale"],
        num_items_in_batch=how["num_items_in_batch"],
        chunk_mib=record.chunk_mib,
        entropy_out=entropies,
    )
    return loss, entropies.sum(), (labels != IGNORE_INDEX).sum()


def _why_left_to_trl(weight: Tensor) -> str | None:
    if is_partitioned(weight):
        return "DeepSpeed's ZeRO-3 partitions the head, which TRL gathers for its own"
    if is_dtensor(weight) or type(weight) in (Tensor, nn.Parameter):
        return None
    return f"the head's weight is a {type(weight).__name__}"


def _whole(tensor: Any, dtype: torch.dtype) -> Any:
    """Return all rows of a ``DTensor``, in the dtype of the hidden states: under FSDP's mixed
    precision it is of another.
    """
    return tensor.full_tensor().to(dtype=dtype) if is_dtensor(tensor) else tensor


class OfLogits(OnKernels):
    """GKDTrainer.

    A subclass with a ``generalized_jsd_loss`` of its own gets the logits, as from TRL.
    """

    def _patch_model(self, name: str, model: nn.Module, **options: Any) -> None:
        if name == "model":  # an SFTTrainer's, with TRL's head
            super()._patch_model(name, model, **options)
        else:
            apply_patch(model, **options)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return TRL's loss, the divergence of all labels' tokens at temperature 1."""
        trls, trainer = cast(Any, super()), cast(Any, self)
        has_own_loss = trainer.generalized_jsd_loss is not trls.generalized_jsd_loss
        if self._options is None or has_own_loss or flags.return_logits() is True:
            return trls.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        teacher = trainer.teacher_model.eval()
        with deferred_logits():
            outputs = model(**given)
            with torch.no_grad():
                others = teacher(**given)
        loss = distillation_loss(
            outputs,
            others,
            inputs["labels"],
            divergence="jsd",
            beta=trainer.beta,
            num_items_in_batch=num_items_in_batch,
        )
        return (loss, outputs) if return_outputs else loss
