"""What the labels of a call say before the model runs: how many are supervised, what their tokens
weigh, and which tokens' results the call uses. B: rows, T: tokens of a row.

- The fused loss needs the number of supervised labels on the host. Were it counted at the loss, the
  host would wait there until the device has run the whole forward pass, and only then launch the
  backward pass.
- ``model(..., labels=labels, loss_weights=weights)``: ``loss_weights[b, t]`` belongs to
  ``labels[b, t]`` of the call, or to its ``shift_labels[b, t]`` where these are given.
- Results of padding need not be eager's, where no token uses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from liger_patch.kernels.head.labels import compact_ahead
from liger_patch.patch.packing import IGNORE_INDEX, next_labels
from liger_patch.patch.settings import PatchRecord
from liger_patch.subclass import is_transformers, original_class

HANDS_OVER = "_liger_patch_hands_over"  # of a patched class: see gives_logits_to_loss
LOSS_WEIGHTS = "loss_weights"
OUTPUT_FLAGS = ("output_router_logits", "output_hidden_states", "output_attentions")


class ExpectedLabels(NamedTuple):
    """What the loss of a call will be given, if the model does not change it.

    Attributes:
        labels: (B, T) ``labels`` of the call, or its ``shift_labels``.
        version: PyTorch's count of writes to these labels.
        ignore_index: that of the loss.
        shifted: whether they are ``shift_labels``: each token predicts the label in its own place.
        targets: (B T,) the label that each token predicts.
    """

    labels: Tensor
    version: int
    ignore_index: int
    shifted: bool
    targets: Tensor


def flat_targets(
    labels: Tensor,  # (B, T)
    ignore_index: int,
    *,
    shifted: bool,  # whether each token predicts the label in its own place
    expected: ExpectedLabels | None = None,
) -> Tensor:
    """Return (B T,), the label that each token predicts.

    These are the targets that were counted before the model ran, if nothing has changed the labels
    since; the operator finds the count by this very tensor.
    """
    if (
        expected is not None
        and labels is expected.labels
        and labels._version == expected.version
        and (ignore_index, shifted) == (expected.ignore_index, expected.shifted)
    ):
        return expected.targets
    return (labels if shifted else next_labels(labels, ignore_index)).reshape(-1)


def expected_labels(head: nn.Module | None, arguments: Mapping[str, Any]) -> ExpectedLabels | None:
    """Start to count the supervised labels among a call's arguments.

    None where the loss may be given something else than (B, T) integer labels, or where a later
    change of the labels would not be noticed.
    """
    shifted = arguments.get("shift_labels") is not None
    labels = arguments.get("shift_labels" if shifted else "labels")
    vocab_size = getattr(head, "out_features", None)
    ignore_index = arguments.get("ignore_index", IGNORE_INDEX)
    if type(labels) is not Tensor or labels.is_floating_point() or labels.is_complex():
        return None
    if labels.is_inference() or torch.is_inference_mode_enabled():
        return None  # tensors without a version: a change would not be noticed
    if labels.dim() != 2 or not isinstance(vocab_size, int) or not isinstance(ignore_index, int):
        return None
    targets = flat_targets(labels, ignore_index, shifted=shifted)
    compact_ahead(targets, vocab_size, ignore_index)
    return ExpectedLabels(labels, labels._version, ignore_index, shifted, targets)


def take_weights(arguments: dict[str, Any]) -> Tensor | None:
    """Remove the weights from the arguments of a call, and return them, (B, T); None without.

    Raises:
        ValueError: they are no floating-point tensor, or require a gradient.
    """
    weights = arguments.pop(LOSS_WEIGHTS, None)
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{LOSS_WEIGHTS} must be a floating-point tensor (B, T), got {kind}")
    if weights.requires_grad:
        raise ValueError(f"{LOSS_WEIGHTS} must not require a gradient: none is computed for them")
    return weights


def weights_of_targets(
    weights: Tensor,  # (B, T)
    labels: Tensor,  # (B, T) of the call, or its shift_labels
    labels_shifted: bool,  # whether ``labels`` are shift_labels
    given: Tensor,  # (B, T) labels that the model gives to its loss, or shift_labels
    ignore_index: int,
    *,
    shifted: bool,  # whether ``given`` are shift_labels: a model may make them of labels
) -> Tensor:
    """Return (B, T), the weight of what each token predicts.

    Raises:
        ValueError: weights of another shape than the labels, or labels that the model has moved to
            other places.
    """
    if weights.shape != labels.shape:
        raise ValueError(
            f"{LOSS_WEIGHTS} must have the shape of the labels {tuple(labels.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    if given is not labels or shifted != labels_shifted:  # else the host need not read them
        targets = given if shifted else next_labels(given, ignore_index)
        expected = labels if labels_shifted else next_labels(labels, ignore_index)
        is_there = targets == expected.to(targets.device)
        if not (is_there | (targets == ignore_index)).all():  # a model may leave out some
            raise ValueError(
                f"{LOSS_WEIGHTS} cannot follow labels that the model's own code moves to other "
                "places"
            )
    return weights if labels_shifted else pad(weights[..., 1:], (0, 1))


def used_by_loss(
    model: PreTrainedModel,
    record: PatchRecord,
    expected: ExpectedLabels | None,
    named: Mapping[str, Any],
) -> Tensor | None:
    """Return (B, T) bool, True for the tokens whose results a call uses. None for all of them: in a
    loss that is not fused, or that may not be the one that is expected, as in a forward that is not
    Transformers' own.
    """
    if expected is None or not getattr(type(model), HANDS_OVER):
        return None
    if record.replaced_forward is not None or not is_transformers(original_class(model).forward):
        return None
    targets = expected.targets.view(expected.labels.shape)
    return used_tokens(model, record, targets, expected.ignore_index, named)


def gives_logits_to_loss(original: type[PreTrainedModel]) -> bool:
    """Return whether a class gives its logits to ``self.loss_function``, and to nothing else that
    could be a loss.
    """
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    names = () if code is None else code.co_names
    return "loss_function" in names and not {"CrossEntropyLoss", "functional", "F"} & {*names}


def used_tokens(
    model: PreTrainedModel,
    record: PatchRecord,
    targets: Tensor,  # (B, T)
    ignore_index: int,
    named: Mapping[str, Any],
) -> Tensor | None:
    """Return (B, T) bool, True for the tokens whose results a call uses: those that predict a
    label. None for all of them, where a router's loss or the caller may use others; where the mask
    is the caller's own, who may give it to other calls; on several devices, to each of which the
    mask is copied; and in architectures that are not tested.

    Args:
        targets: (B, T) the label that each token predicts.
        named: the arguments of the call, by their names.
    """
    config = model.config.get_text_config()
    uses_others = getattr(config, "z_loss_coefficient", 0.0) or any(
        getattr(config, name, False) if named.get(name) is None else named[name]
        for name in OUTPUT_FLAGS
    )
    mask = named.get("attention_mask")
    has_own_mask = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if uses_others or has_own_mask or len(devices) > 1 or not record.tested:
        return None
    return targets != ignore_index
