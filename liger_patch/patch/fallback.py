"""Why a forward pass computes its logits: the reasons that are known before the head runs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from liger_patch.deferred.engines import in_process_group
from liger_patch.deferred.kept_weight import why_weight_cannot_be_kept
from liger_patch.deferred.tensor_parallel import is_dtensor
from liger_patch.kernels.graphs import is_exporting, is_in_compiled_call, is_without_values


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
