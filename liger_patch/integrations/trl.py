"""TRL: its trainers' fused head on the kernels of this package. Imported only by those who ask.

TRL's trainers give a model a second way to be called, ``model(..., fused_lm_head=True)``, which
returns log-probabilities of the labels instead of logits. Here that call runs the model's own
forward with deferred logits and computes the same output from them; all other calls, and the
trainer's losses and metrics, stay TRL's.

    from liger_patch.integrations.trl import SFTConfig, SFTTrainer
    SFTTrainer(model, args=SFTConfig(use_liger_patch=True, ...), ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import trl
from torch import nn

from liger_patch.apply import apply_patch, revert_patch
from liger_patch.integrations.trl_head import (
    SUPPORTED,
    Flag,
    LogProbsCall,
    check_loss_is_trls,
    is_flagged,
    trls_head,
)
from liger_patch.patch.forward import record_of
from liger_patch.readers.wrapped_model import transformers_model

Model = TypeVar("Model", bound=nn.Module)
MODELS = ("model", "ref_model", "teacher_model")  # of a trainer


@dataclass
class SFTConfig(Flag, trl.SFTConfig):  # pyright: ignore[reportPrivateImportUsage]
    """``trl.SFTConfig`` with ``use_liger_patch``, whether ``SFTTrainer`` of this module computes
    log-probabilities, entropy and accuracy with the kernels of liger_patch.
    """


class OnKernels:
    """What the trainers of this package do with the flag. Without it they behave as TRL's, whose
    arguments they take.

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
        construct(*arguments, **named)
        self._patch()

    def _patch(self) -> None:
        options, trainer = self._options, cast(Any, self)
        if options is None:
            return
        for name in MODELS:
            model = getattr(trainer, name, None)
            if model is not None:  # TRL may have made it itself
                model = trainer.accelerator.unwrap_model(model)
                self._patch_model(name, model, **(options.get(name) or options.get("model", {})))

    def _patch_model(self, name: str, model: nn.Module, **options: Any) -> None:
        """Patch one of MODELS, to which TRL has added its head."""
        apply_trl_patch(model, **options)


class SFTTrainer(OnKernels, trl.SFTTrainer):  # pyright: ignore[reportPrivateImportUsage]
    """``trl.SFTTrainer``; with ``SFTConfig(use_liger_patch=True)``, on kernels."""

    def _patch_model(self, name: str, model: nn.Module, **options: Any) -> None:
        args: Any = self.args  # nll weighs all tokens of a batch the same, dft does not
        apply_trl_patch(model, same_gradient=args.loss_type == "nll", **options)


def apply_trl_patch(
    model: Model,
    *,
    same_gradient: bool = False,
    chunk_mib: float | None = None,
    layers: bool | Collection[str] = True,
    checkpoint_offload: bool | float = False,
    strict: bool = False,
) -> Model:
    """Compute what TRL's fused head of this one model returns with the kernels of liger_patch.

    For a model that a trainer of TRL holds, once the trainer exists: ``trainer.model``, and
    ``trainer.ref_model`` where there is one. ``revert_patch`` undoes it, ``patch_status`` says what
    is fused. Heads that cannot be fused are left to TRL, with one warning that names the reason.

    Args:
        model: a Transformers model to which TRL has added its fused head, or a PEFT wrapper around
            one.
        same_gradient: whether the loss weighs all tokens of a batch the same (SFT), see
            ``linear_log_probs``.
        chunk_mib, layers, checkpoint_offload, strict: as in ``apply_patch``.

    Returns:
        The same object.

    Raises:
        ValueError: an option is out of range; the model was patched before the trainer was made;
            or, with ``strict``, the architecture has no row in the registry.
        RuntimeError: TRL has added no head to the model, or one that is not known here.
        TypeError: not a Transformers model.
    """
    if not isinstance(same_gradient, bool):
        raise ValueError(f"same_gradient must be True or False, got {same_gradient!r}")
    options: dict[str, Any] = {
        "chunk_mib": chunk_mib,
        "layers": layers,
        "checkpoint_offload": checkpoint_offload,
        "strict": strict,
    }
    target = transformers_model(model)
    record = record_of(target)
    head = trls_head(target)
    if record is None:
        if head is None:
            raise RuntimeError(
                f"{type(target).__name__} has no fused head of TRL that is known here. Call "
                "apply_trl_patch(trainer.model) once a trainer of SFT, DPO, KTO, GRPO or RLOO is "
                f"made, with {SUPPORTED}, got trl {trl.__version__}; other trainers: "
                "use_liger_patch=True of liger_patch.integrations.trl_trainers"
            )
        apply_patch(target, **options)
        record = record_of(target)
        assert record is not None
        record.replaced_forward = vars(target).pop("forward", record.replaced_forward)
        head_options, record.passes_through = head
        record.fused_head_call = LogProbsCall(**head_options, same_gradient=same_gradient)
    elif isinstance(record.fused_head_call, LogProbsCall) and head is None:
        record.fused_head_call.same_gradient = same_gradient
        apply_patch(target, **options)
    else:
        raise ValueError(
            f"{type(target).__name__} was patched before TRL added its head: make the trainer of "
            "an unpatched model (revert_patch(model) takes a patch back), then call "
            "apply_trl_patch(trainer.model)"
        )
    return model


def revert_for_trl(model: Any) -> dict[str, Any]:
    """Revert a patched model before TRL adds its head to it.

    Returns:
        The options of ``apply_trl_patch`` with which to patch it again; empty if it was not
        patched.

    Raises:
        ValueError: the model was patched with options that change the loss, which is TRL's here.
    """
    target = transformers_model(model)
    record = record_of(target)
    if record is None:
        return {}
    check_loss_is_trls(record.settings)
    offload = record.offload
    revert_patch(model)
    return {
        "chunk_mib": record.settings.chunk_mib,
        "layers": record.layers,
        "checkpoint_offload": False if offload is None else offload.host_gib or True,
    }
