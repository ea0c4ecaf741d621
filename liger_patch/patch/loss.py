"""The loss of one forward pass of a patched model: fused on deferred logits, ordinary on real ones.

Replaces Transformers' ``ForCausalLMLoss`` during a patched forward pass, and
``torch.nn.functional.cross_entropy`` of deferred logits in models that compute their own loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_patch import flags
from liger_patch.deferred.fuse import Parts, fused_loss, parts_of
from liger_patch.deferred.gradients import leave_gradient_out
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.head.arguments import checked_chunk_bytes
from liger_patch.kernels.head.options import LossOptions
from liger_patch.kernels.head.pytorch import accumulation_dtype
from liger_patch.patch.packing import next_labels, sequence_weights
from liger_patch.patch.verify import disagreement


@dataclass(frozen=True)
class LossSettings:
    """The options of ``apply_patch``.

    Attributes:
        label_smoothing: in [0, 1].
        z_loss: >= 0.
        chunk_mib: MiB of logits held at once, > 0; None for the operator's default.
            LIGER_PATCH_CHUNK_MIB overrides it.
        reduction: "mean" or "sum" over the supervised tokens where no ``num_items_in_batch`` is
            given.
        loss_average: "token", or "sequence" for the mean (or sum) of each sequence's own mean.

    Raises:
        ValueError: names the option, its value and what was expected.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_mib: float | None = None
    reduction: str = "mean"
    loss_average: str = "token"

    def __post_init__(self) -> None:
        LossOptions(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        checked_chunk_bytes(self.chunk_mib, trains_weight=True)
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {self.reduction!r}')
        if self.loss_average not in ("token", "sequence"):
            raise ValueError(
                f'loss_average must be "token" or "sequence", got {self.loss_average!r}'
            )

    @property
    def changes_loss(self) -> bool:
        """Whether the loss differs from that of Transformers."""
        return bool(self.changed)

    @property
    def changed(self) -> str:
        """The options that change the loss, for messages."""
        own, usual = vars(self), vars(LossSettings(chunk_mib=self.chunk_mib))
        return ", ".join(f"{name}={own[name]!r}" for name in own if own[name] != usual[name])


class OtherCall(Protocol):
    """A way to call a patched model that a library has added to it, by replacing ``forward``."""

    @property
    def otherwise(self) -> str:
        """What liger_patch does where it cannot fuse, for messages."""
        ...

    def is_meant(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments is one."""
        ...

    def __call__(
        self, model: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of such a call; ``forward``: of the model, for other calls."""
        ...


@dataclass
class PatchRecord:
    """What has been decided for one patched model, at its last forward pass.

    Attributes:
        settings: the options of ``apply_patch``.
        fused: whether the last loss was fused; None before the first.
        reason: why the last loss was not fused.
        warned: the reasons that have been warned of.
        verified: whether LIGER_PATCH_VERIFY has had its step.
        distrusted: what LIGER_PATCH_VERIFY found wrong; the model is not fused any more.
        replaced_forward: what the model's instance had as its own ``forward`` when it was patched
            (hooks of accelerate).
        passes_through: whether that only calls the model's own forward, which is then called
            without it.
        other_call: takes other calls than those with labels.
    """

    settings: LossSettings
    fused: bool | None = None
    reason: str | None = None
    warned: set[str] = field(default_factory=set)
    verified: bool = False
    distrusted: str | None = None
    replaced_forward: Callable[..., Any] | None = None
    passes_through: bool = False
    other_call: OtherCall | None = None

    @property
    def chunk_mib(self) -> float | None:
        """MiB of logits held at once, None for the operator's default."""
        return flags.chunk_mib() or self.settings.chunk_mib

    @property
    def is_ordinary(self) -> bool:
        """Whether the loss is Transformers' own, bit for bit, where a token is supervised: with
        LIGER_PATCH_RETURN_LOGITS=1, unless options of ``apply_patch`` change it.
        """
        return flags.return_logits() is True and not self.settings.changes_loss

    def fall_back(self, reason: str) -> None:
        """Warn once that a loss is not fused, and why; an error where fusing was demanded."""
        if flags.return_logits() is False:
            raise RuntimeError(f"LIGER_PATCH_RETURN_LOGITS=0 demands the fused loss, but {reason}")
        self.fused, self.reason = False, reason
        if reason not in self.warned:
            self.warned.add(reason)
            otherwise = "computes ordinary logits and an ordinary loss"
            if self.other_call is not None:
                otherwise = self.other_call.otherwise
            warnings.warn(f"liger_patch {otherwise}: {reason}", stacklevel=2)


@dataclass
class ForwardPass:
    """One forward pass of a patched model, from its labels to its loss.

    Attributes:
        record: of the model.
        head_name: the output embedding, for messages.
        unfused: why the logits of this forward pass are not deferred, None where they are.
        starts: (B, T) where sequences begin, None where each row is one.
        num_sequences: of the whole step; None for those of this call.
        done: whether a loss was computed here.
        running: False once the forward pass has returned its outputs.
        read_by: the operation that first needed the values of the logits.
        unreached: the option that does not apply to a loss of the model's own.
    """

    record: PatchRecord
    head_name: str
    unfused: str | None = None
    starts: Tensor | None = None
    num_sequences: Tensor | int | None = None
    done: bool = False
    running: bool = True
    read_by: str | None = None
    unreached: str | None = None

    def note_read(self, operation: str) -> None:
        """Note that the named operation needs the values of the logits, or their gradient: a loss
        that is not computed yet is not fused.
        """
        self.read_by = self.read_by or operation

    def _fused_loss(
        self, logits: DeferredLogits, parts: Parts, labels: Tensor, **options: Any
    ) -> Tensor:
        """Compute the fused loss of deferred logits from what they are made of."""
        loss = fused_loss(parts, labels, chunk_mib=self.record.chunk_mib, **options)
        leave_gradient_out(loss, logits)
        return loss

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
        """Compute Transformers' ``ForCausalLMLoss``: tokens < t predict token t; () in float32."""
        self.done = True
        targets = next_labels(labels, ignore_index) if shift_labels is None else shift_labels
        # Transformers' mean of no supervised token is nan: the host reads the labels, only here
        is_ordinary = self.record.is_ordinary and bool((targets != ignore_index).any())
        is_plain = type(logits) in (Tensor, nn.Parameter, DeferredLogits)
        if is_ordinary:
            self.record.fused, self.record.reason = False, "LIGER_PATCH_RETURN_LOGITS=1"
        elif not is_plain:
            self._leave_to_transformers(type(logits).__name__)
        if is_ordinary or not is_plain:
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
        if self.record.settings.loss_average == "sequence":
            supervised = targets.to(logits.device) != ignore_index
            token_weight, count = sequence_weights(
                self.starts, supervised, accumulation_dtype(logits.dtype)
            )
            num_items_in_batch = self._denominator(count, num_items_in_batch)
        reduction = "mean" if num_items_in_batch is not None else self.record.settings.reduction
        return self._loss(
            logits,
            targets.reshape(-1).to(logits.device),
            vocab_size,
            ignore_index=ignore_index,
            reduction=reduction,
            num_items_in_batch=num_items_in_batch,
            label_smoothing=self.record.settings.label_smoothing,
            z_loss=self.record.settings.z_loss,
            token_weight=token_weight,
        )

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
        parts = parts_of(input)
        if parts is None:
            return NotImplemented
        options: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "class_weight": weight,
        }
        if self.running:
            # the model's own loss: apply_patch's options are meant for it
            settings = self.record.settings
            if settings.loss_average != "token":
                self.unreached = f"loss_average={settings.loss_average!r}"
                return NotImplemented  # the sequences of the tokens are not known here
            options["label_smoothing"] = label_smoothing or settings.label_smoothing
            options["z_loss"] = settings.z_loss
            if not self._trusts(parts, target, **options):
                return NotImplemented
            reduction = settings.reduction if reduction == "mean" else reduction
            self.done = True
            self.record.fused, self.record.reason = True, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
            loss = self._fused_loss(input, parts, target, reduction=reduction, **options)
        # autocast computes cross entropy in float32
        return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)

    def _denominator(self, count: Tensor, num_tokens: Tensor | int | None) -> Tensor | int | None:
        """Return what a sum of sequences' means is divided by; None for nothing."""
        if self.num_sequences is not None:
            return self.num_sequences
        if num_tokens is not None:
            raise ValueError(
                "num_items_in_batch counts tokens, but apply_patch was given "
                'loss_average="sequence". Pass num_sequences_in_batch too: the number of sequences '
                "in all forward passes of the step. The Trainer of "
                "liger_patch.integrations.transformers does so"
            )
        return None if self.record.settings.reduction == "sum" else count

    def _leave_to_transformers(self, kind: str) -> None:
        """Fall back for a tensor subclass, which only Transformers' own loss can take."""
        if self.record.settings.changes_loss:
            changed = self.record.settings.changed
            raise ValueError(f"{changed} cannot be applied to logits of type {kind}")
        self.record.fall_back(
            self.unfused or f"the head ({self.head_name}) returns logits of type {kind}"
        )

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        parts = self.fusable(logits, labels, vocab_size, **options)
        if parts is not None:
            self.record.fused, self.record.reason = True, None
            with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
                return self._fused_loss(cast(DeferredLogits, logits), parts, labels, **options)
        if isinstance(logits, DeferredLogits):
            logits = logits.real_logits()
        return cross_entropy(logits.reshape(-1, vocab_size), labels, **options)

    def fusable(
        self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any
    ) -> Parts | None:
        """Return what logits are made of where the fused operators may be used; else None, and the
        record has the reason.
        """
        if flags.return_logits():
            self.record.fused, self.record.reason = False, "LIGER_PATCH_RETURN_LOGITS=1"
            return None
        if self.unfused is not None:
            self.record.fall_back(self.unfused)
            return None
        if self.read_by is not None:
            self.record.fall_back(
                f"the logits of the head ({self.head_name}) were read by {self.read_by} before the "
                "loss"
            )
            return None
        if not isinstance(logits, DeferredLogits):
            self.record.fall_back(f"the head ({self.head_name}) computes its logits itself")
            return None
        parts = parts_of(logits)
        if parts is None or logits.shape[-1] != vocab_size:
            self.record.fall_back(
                f"the head ({self.head_name}) or the model does more to the logits than a fused "
                "loss can follow"
            )
            return None
        if not self._trusts(parts, labels, **options):
            self.record.fall_back(self.record.distrusted or "")
            return None
        return parts

    def _trusts(self, parts: Parts, labels: Tensor, **options: Any) -> bool:
        """Return whether the fused loss may be used; LIGER_PATCH_VERIFY=1 compares one step."""
        record = self.record
        if flags.verify() and torch.is_grad_enabled() and not record.verified:
            record.verified = bool((labels != options["ignore_index"]).any())
            record.distrusted = disagreement(parts, labels, **options)
        return record.distrusted is None
