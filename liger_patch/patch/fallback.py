"""Why no loss of a call is fused: the reasons that are known before the head runs, and losses that
the call itself does not compute.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from liger_patch.deferred.engines import in_process_group
from liger_patch.deferred.kept_weight import why_weight_cannot_be_kept
from liger_patch.deferred.tensor_parallel import is_dtensor
from liger_patch.kernels.graphs import is_exporting, is_in_compiled_call, is_without_values
from liger_patch.patch import flags
from liger_patch.patch.settings import LOGITS_ASKED, PatchRecord

LOSS_OUTSIDE = "the model was called without labels, and its logits were used in a loss. "
IN_TRAINER = (
    "Give it labels; in Trainer, use apply_patch(label_smoothing=...) instead of "
    "label_smoothing_factor, and the model's own loss instead of compute_loss_func; for TRL's "
    "trainers see liger_patch.integrations.trl"
)
IN_TRL = "TRL has no fused loss with label_smoothing_factor or compute_loss_func"
TRLS_HEAD = (
    "TRL has replaced the forward of a model that was patched before. Use the trainer of "
    "liger_patch.integrations with use_liger_patch=True, or give TRL's an unpatched model and call "
    "apply_trl_patch(trainer.model)"
)
LIGERS = (
    "Liger-Kernel has replaced the forward of a model that was patched before. Leave out "
    "use_liger_kernel=True of the Trainer's arguments, and load the model again"
)


def _own(module: ModuleType, name: str) -> Any:
    """Return a module's function; None where somebody has replaced it before this import."""
    function = getattr(module, name)
    return function if getattr(function, "__globals__", None) is vars(module) else None


FIXED_CROSS_ENTROPY = _own(loss_utils, "fixed_cross_entropy")
CROSS_ENTROPY = _own(nn.functional, "cross_entropy")


def why_not_deferred(model: PreTrainedModel, head: nn.Module | None) -> str | None:
    """Return why a call that nothing transforms leaves its logits to the head; None where they are
    deferred.
    """
    if head is None:
        return "get_output_embeddings() returns None"
    if isinstance(head, torch.jit.ScriptModule):
        return "torch.jit has compiled the head"
    if is_in_compiled_call() and is_dtensor(getattr(head, "weight", None)):
        return "torch.compile traces a head whose weight is a DTensor"
    if in_process_group():
        reason = why_weight_cannot_be_kept(model, head)
        if reason is not None:
            return reason
    if getattr(model, "_is_replica", False):
        return "torch.nn.DataParallel gathers the logits of every replica"
    if torch.is_grad_enabled() and _has_backward_hooks(head):
        return f"backward hooks of the head ({description(head)}) see the gradient of its logits"
    return None


def why_loss_is_other() -> str | None:
    """Return which function behind Transformers' loss somebody has replaced; None for none."""
    if loss_utils.fixed_cross_entropy is not FIXED_CROSS_ENTROPY:
        return "transformers.loss.loss_utils.fixed_cross_entropy was replaced"
    if nn.functional.cross_entropy is not CROSS_ENTROPY:
        return "torch.nn.functional.cross_entropy was replaced"
    return None


def why_transformed() -> str | None:
    """Return what transforms or records the forward pass, so that this package's loss and hooks
    cannot take part in it; None for an ordinary call.
    """
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the forward pass"
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "torch.jit.trace records the forward pass"
    if is_exporting() or (torch._C._len_torch_dispatch_stack() > 0 and is_without_values()):
        return "torch.export, make_fx or FakeTensorMode runs the forward pass without values"
    return None


def class_name(head: nn.Module | None) -> str:
    """Return module and name of a head's class: that of PEFT's Linear is not torch's."""
    return f"{type(head).__module__}.{type(head).__qualname__}"


def description(head: nn.Module | None) -> str:
    """Return the head's class, with what PEFT's adapters on it do beside LoRA, or the kind of its
    weight where that is no plain tensor.
    """
    variants = {type(each).__name__ for each in getattr(head, "lora_variant", {}).values()}
    if variants:
        return f"{class_name(head)} with {' and '.join(sorted(variants))}"
    weight = None if head is None else dict(head.named_parameters(recurse=False)).get("weight")
    if weight is None or type(weight) in (torch.Tensor, nn.Parameter):
        return class_name(head)
    return f"{class_name(head)} with a weight of type {type(weight).__name__}"


def _has_backward_hooks(head: nn.Module) -> bool:
    """Return whether hooks of the head or of all modules run in its backward pass, of any kind."""
    return any((*head._get_backward_hooks(), head._get_backward_pre_hooks()))


def note_loss_outside(record: PatchRecord, outputs: Any) -> None:
    """Have the backward pass through a call's real logits note that no loss was fused. Not in a
    graph of torch.compile, which takes no such hook.
    """
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or not logits.requires_grad:
        return
    if torch.compiler.is_compiling() or why_transformed() is not None:
        return
    asked = flags.return_logits() is True

    def note(_: Tensor) -> None:
        if asked:
            record.note(LOGITS_ASKED)
        elif record.fused_head_call is None:
            record.note(LOSS_OUTSIDE + IN_TRAINER)
        elif record.fused:  # else TRL was told why
            record.note(LOSS_OUTSIDE + IN_TRL)

    logits.register_hook(note)


def note_other_forward(record: PatchRecord, forward: object) -> None:
    """Note that a trainer gives the model a forward with TRL's or Liger-Kernel's head, which does
    not call the patched one.
    """
    function = getattr(forward, "__func__", None)
    if "fused_lm_head" in (getattr(function, "__kwdefaults__", None) or {}):
        record.note(TRLS_HEAD, "leaves the head to TRL")
    elif str(getattr(function, "__module__", None)).startswith("liger_kernel."):
        record.note(LIGERS, "leaves the loss to Liger-Kernel")
