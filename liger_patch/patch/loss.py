"""The loss of one forward pass of a patched model: fused on deferred logits, ordinary on real ones.

Replaces Transformers' ``ForCausalLMLoss`` during a patched forward pass, and
``torch.nn.functional.cross_entropy`` of deferred logits in models that compute their own loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_patch.deferred.fuse import Decision, HeadProduct, fused_loss, read_record
from liger_patch.deferred.tensor import DeferredLogits, prepare_backward
from liger_patch.deferred.tensor_parallel import DistributedLogits
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.graphs import runs_eagerly
from liger_patch.layers.masked_attention import UsedTokens
from liger_patch.patch.fallback import description
from liger_patch.patch.labels import LOSS_WEIGHTS, ExpectedLabels, flat_targets
from liger_patch.patch.settings import LOGITS_ASKED, PatchRecord
from liger_patch.patch.verify import note_rounding

KNOWN = (DeferredLogits, DistributedLogits, Tensor, nn.Parameter)  # classes of logits


@dataclass
class ForwardPass:
    """One forward pass of a patched model, from its labels to its loss.

    Attributes:
        record: that of the model.
        head: the output embedding.
        unfused: why the logits of this forward pass are not deferred, None where they are.
        widens: whether the head computes in a wider dtype.
        leaks: (B, T) bool, True for labels that another sequence would predict; None for none.
        loss_weights: ``weights_of_targets`` of the call; None where all tokens weigh the same.
        done: whether a method of this class has computed the loss.
        is_causal: whether that was Transformers' loss, which takes every option of ``apply_patch``.
        running: False once the forward pass has returned its outputs.
        read_by: the first operation that needed the values of the logits; None if none did.
        unreached: what of ``changed`` cannot be applied to a loss of the model's own; "" for none.
        head_defers: whether the head's last call returned deferred logits; None before the first.
        expected: the labels of the call, counted before the model ran; None where they were not.
        used: the tokens whose results model and loss use; None in a call without gradients.
    """

    record: PatchRecord
    head: nn.Module | None
    unfused: str | None = None
    widens: bool = False
    leaks: Tensor | None = None
    loss_weights: Callable[..., Tensor] | None = None
    done: bool = False
    is_causal: bool = False
    running: bool = True
    read_by: str | None = None
    unreached: str = ""
    head_defers: bool | None = None
    expected: ExpectedLabels | None = None
    used: UsedTokens | None = None

    @property
    def chunk_mib(self) -> float | None:
        """MiB of logits held at once; None for the default."""
        return self.record.chunk_mib

    @property
    def head_name(self) -> str:
        """The head, for messages."""
        return description(self.head)

    @property
    def changed(self) -> str:
        """The options and weights that make the loss another than Transformers', for messages; ""
        for none. Once some of them could not be applied, these alone.
        """
        weights = "" if self.loss_weights is None else LOSS_WEIGHTS
        return self.unreached or ", ".join(filter(None, (self.record.settings.changed, weights)))

    @property
    def why_not_recorded(self) -> str:
        """What keeps a loss that the model computes itself from being fused, for messages."""
        if self.read_by is not None:
            return self._how_read
        if self.head_defers is None:
            return f"the head ({self.head_name}) was not called"
        if self.head_defers:
            return f"the logits of the head ({self.head_name}) have no part in it"
        return f"the head ({self.head_name}) returns no product that can be recorded"

    @property
    def _how_read(self) -> str:
        """By whom the logits were read, for messages."""
        if self.head_defers is False:
            return f"the head ({self.head_name}) reads its logits itself, by {self.read_by}"
        return f"the logits of the head ({self.head_name}) were read by {self.read_by}"

    def note_read(self, operation: str) -> None:
        """Note that the named operation reads the logits. A loss that comes later is not fused."""
        self.read_by = self.read_by or operation
        if self.used is not None and self.used.without_padding and torch.is_grad_enabled():
            self.record.warn_once(
                "outputs.logits of padded tokens are not eager's, because attention left out their "
                "mask: keep these tokens out of your loss, or call apply_patch with layers that "
                "lack 'attention'"
            )

    @runs_eagerly
    def causal_lm_loss(
        self,
        logits: Tensor,  # (B, T, V)
        labels: Tensor,  # (B, T)
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,  # (B, T)
        **kwargs: Any,
    ) -> Tensor:
        """Compute Transformers' ``ForCausalLMLoss``: tokens < t predict token t. Returns () in
        float32, in float64 for float64 logits.
        """
        self.done = self.is_causal = True
        shifted = shift_labels is not None
        given = labels if shift_labels is None else shift_labels
        is_tensor = isinstance(given, Tensor)
        # numel() makes lengths constants
        if not is_tensor or given.numel() != math.prod(logits.shape[:-1]):
            name = "shift_labels" if shifted else "labels"
            expected = tuple(logits.shape[:-1])
            got = tuple(given.shape) if is_tensor else f"a {type(given).__name__}"
            raise ValueError(f"{name} must be a tensor of shape {expected}, got {got}")
        leaks = None if shifted or self.record.tested else self.leaks
        if leaks is not None and leaks.shape == labels.shape:
            given = labels = labels.masked_fill(leaks.to(labels.device), ignore_index)
        flat = flat_targets(given, ignore_index, shifted=shifted, expected=self.expected)
        settings, changed = self.record.settings, self.changed
        is_transformers_loss = type(logits) not in KNOWN  # which alone takes other classes
        kind = type(logits).__name__
        if is_transformers_loss and changed:
            raise ValueError(f"{changed} cannot be applied to logits of type {kind}")
        if self.unfused == LOGITS_ASKED and not changed:
            # in training, Transformers' mean of no supervised token would be nan: the host reads
            is_transformers_loss = is_transformers_loss or not torch.is_grad_enabled()
            is_transformers_loss = is_transformers_loss or bool((flat != ignore_index).any())
        if is_transformers_loss:
            why = self.unfused or f"the head ({self.head_name}) returns logits of type {kind}"
            self.record.note(why)
            return ForCausalLMLoss(
                logits,
                labels,
                vocab_size,
                num_items_in_batch,  # pyright: ignore[reportArgumentType] an int is taken too
                ignore_index,
                shift_labels,
                **kwargs,
            )
        token_weight = None
        if self.loss_weights is not None:
            token_weight = self.loss_weights(given, ignore_index, shifted=shifted)
            token_weight = token_weight.to(logits.device).reshape(-1)
        reduction = "mean" if num_items_in_batch is not None else settings.reduction
        return self._loss(
            logits,
            flat.to(logits.device),
            vocab_size,
            ignore_index=ignore_index,
            reduction=reduction,
            num_items_in_batch=num_items_in_batch,
            label_smoothing=settings.label_smoothing,
            z_loss=settings.z_loss,
            token_weight=token_weight,
        )

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        decision = self.decide(logits, labels, vocab_size, **options)
        self.record.note(decision.reason)
        if decision.product is not None:
            logits = cast(DeferredLogits, logits)
            return self._fused_loss(logits, decision.product, labels, **options)
        if isinstance(logits, DistributedLogits):
            loss = cross_entropy(logits.full_tensor().reshape(-1, vocab_size), labels, **options)
            return logits.result(_of_evaluation(loss, labels, **options))
        if isinstance(logits, DeferredLogits):
            logits = logits.real_logits()
        loss = cross_entropy(logits.reshape(-1, vocab_size), labels, **options)
        return _of_evaluation(loss, labels, **options)

    def decide(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Decision:
        """Decide whether the loss of these logits is fused."""
        if self.unfused is not None:
            return Decision(reason=self.unfused)
        if self.read_by is not None:
            return Decision(reason=f"{self._how_read} before the loss")
        if not isinstance(logits, DeferredLogits):
            return Decision(reason=f"the head ({self.head_name}) computes its logits itself")
        product = read_record(logits)
        if product is None or product.weight.shape[0] != vocab_size:
            head = f"the head ({self.head_name})"
            return Decision(
                reason=f"{head} or the model does more to the logits than a fused loss can follow"
            )
        note_rounding(self.record, logits, product, labels, **options)
        return Decision(product)

    @runs_eagerly
    def cross_entropy(
        self,
        input: Any,  # (N, V), else NotImplemented
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Compute ``torch.nn.functional.cross_entropy`` of deferred logits, for a model or a user
        that calls it; or return NotImplemented.
        """
        if not isinstance(input, DeferredLogits) or input.dim() != 2 or input.is_computed:
            return NotImplemented
        if target.dim() != 1 or target.is_floating_point():
            return NotImplemented
        if size_average is not None or reduce is not None:
            return NotImplemented
        product = read_record(input)
        if product is None:
            return NotImplemented
        options: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "class_weight": weight,
        }
        if self.running:
            # the model computes its own loss: the options of apply_patch are meant for this one
            settings, unreached = self.record.settings, []
            if label_smoothing and settings.label_smoothing not in (0.0, label_smoothing):
                unreached.append(f"label_smoothing={settings.label_smoothing!r}")
            # what follows a loss that is not a mean is the model's own
            if reduction != "mean" and settings.reduction != "mean":
                unreached.append(f"reduction={settings.reduction!r}")
            if self.loss_weights is not None:  # the places of the labels are not known here
                unreached.append(LOSS_WEIGHTS)
            if unreached:
                self.unreached = ", ".join(unreached)
                return NotImplemented
            options["label_smoothing"] = label_smoothing or settings.label_smoothing
            options["z_loss"] = settings.z_loss
            note_rounding(self.record, input, product, target, **options)
            reduction = settings.reduction if reduction == "mean" else reduction
            self.done = True
            self.record.note(None)
        loss = self._fused_loss(input, product, target, reduction=reduction, **options)
        # the result has eager's dtype: autocast computes cross entropy in float32
        return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)

    def _fused_loss(
        self, logits: DeferredLogits, product: HeadProduct, labels: Tensor, **options: Any
    ) -> Tensor:
        """Compute the fused loss of deferred logits from what they are made of."""
        self.record.before_loss()
        with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
            loss = fused_loss(product, labels, chunk_mib=self.record.chunk_mib, **options)
        prepare_backward(loss, logits)
        return logits.result(_of_evaluation(loss, labels, **options))


def _of_evaluation(
    loss: Tensor,
    labels: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    num_items_in_batch: Tensor | int | None = None,
    **_: object,
) -> Tensor:
    """Return the loss. Without gradients, a mean over no supervised tokens or items is nan, as
    PyTorch's: Trainer leaves such a batch out of its ``eval_loss``. In training it stays 0, which
    harms no weight.
    """
    if torch.is_grad_enabled() or reduction != "mean":
        return loss
    if num_items_in_batch is None:
        is_some = (labels != ignore_index).any()
    else:
        is_some = torch.as_tensor(num_items_in_batch != 0)
    return torch.where(is_some.to(loss.device), loss, torch.nan)
