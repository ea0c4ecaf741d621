"""The options and the state of one patched model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from liger_patch.kernels.head.inputs import checked_chunk_bytes
from liger_patch.kernels.options import LossOptions
from liger_patch.patch import flags
from liger_patch.patch.offload import CheckpointOffload

LOGITS_ASKED = "LIGER_PATCH_RETURN_LOGITS=1"  # the reason that needs no warning
CHANGE_LOSS = ("label_smoothing", "z_loss", "reduction")  # of LossSettings


@dataclass(frozen=True)
class LossSettings:
    """The options of ``apply_patch`` that concern the loss. This class checks them.

    ``changed``: those that change the loss, with their values, for messages; "" for none.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_mib: float | None = None
    reduction: str = "mean"
    changed: str = field(init=False)

    def __post_init__(self) -> None:
        LossOptions(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        checked_chunk_bytes(self.chunk_mib, trains_weight=True)
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {self.reduction!r}')
        for name in ("label_smoothing", "z_loss", "chunk_mib"):
            if getattr(self, name) is not None:  # a Fraction has no format before 3.12
                object.__setattr__(self, name, float(getattr(self, name)))
        values = ((name, getattr(self, name)) for name in CHANGE_LOSS)
        changed = ", ".join(f"{n}={v!r}" for n, v in values if v != getattr(LossSettings, n))
        object.__setattr__(self, "changed", changed)


@dataclass
class PatchRecord:
    """The options and the state of one patched model.

    Attributes:
        fused, reason: as ``patch_status`` gives them.
        instead: what happens where no loss is fused, in words.
        warned: the warnings that were given.
        tested: whether the architecture has a row in the registry, and its class Transformers' own
            forward. Any other is compared with the ordinary path at its first call, by
            ``patch.verify``, and its labels are masked in Transformers' loss only.
        compared: for an architecture without a row, what its first call compared, in words, or why
            it did not; None before the first call with labels.
        verified: whether that loss agreed with the fused one.
        distrusted: what that comparison found wrong, in words: from then on, the model is not
            fused. None where nothing was wrong.
        differs: whether that is another loss. Otherwise nothing could be compared.
        replaced_forward: the ``forward`` that the instance itself had when it was patched (hooks of
            accelerate, TRL's head); None where it had none.
        passes_through: whether ``replaced_forward`` only calls the model's own forward, so that
            calls may leave it out.
        fused_head_call: a second way to call the model, which TRL has added by replacing
            ``forward``: see ``integrations.trl_head.LogProbsCall``. None where there is none.
        replacements: ``subclass.count_replacements`` when layers were put on kernels.
        adapters: the model's ``peft_config`` for which its LoRA layers were put on kernels, and a
            copy of it from that time, which shows what has been added since.
        checked_dtypes: whether the dtypes of these adapters have been looked at, and warned of
            where they make layers run PEFT's own forward.
        looks_at_packing: how many training calls ``packing`` has searched.
        unpacks: how many recurrent layers take packed rows: see ``layers.recurrent``.
    """

    settings: LossSettings
    fused: bool | None = None
    reason: str | None = None
    instead: str = ""
    warned: set[str] = field(default_factory=set)
    tested: bool = True
    architecture: str = ""
    compared: str | None = None
    verified: bool = False
    distrusted: str | None = None
    differs: bool = False
    replaced_forward: Callable[..., Any] | None = None
    passes_through: bool = False
    fused_head_call: Any = None
    layers: bool | frozenset[str] = False
    replacements: int = 0
    adapters: tuple[dict[str, Any], dict[str, Any]] | None = None
    checked_dtypes: bool = False
    offload: CheckpointOffload | None = None
    looks_at_packing: int = 0
    unpacks: int = 0

    def wants(self, name: str) -> bool:
        """Return whether layers of a name run on kernels, also those of adapters to come."""
        return self.layers if isinstance(self.layers, bool) else name in self.layers

    @property
    def chunk_mib(self) -> float | None:
        """Return the MiB of logits held at once, None for the operator's default."""
        return flags.chunk_mib() or self.settings.chunk_mib

    def before_loss(self) -> None:
        """Give back device memory that a fused loss can use."""
        if self.offload is not None:
            self.offload.before_loss()

    def note(self, reason: str | None, fallback_text: str | None = None) -> None:
        """Note why a loss is not fused, None where it is. Warn once of each reason but
        LOGITS_ASKED; raise RuntimeError where fusing was demanded.

        Args:
            fallback_text: what happens instead, where that is not what the record says.
        """
        is_expected = reason in (None, LOGITS_ASKED)
        if not is_expected and flags.return_logits() is False:
            raise RuntimeError(f"LIGER_PATCH_RETURN_LOGITS=0 demands the fused loss, but {reason}")
        self.fused, self.reason = reason is None, reason
        if fallback_text is None and self.fused_head_call is not None:
            fallback_text = self.fused_head_call.fallback_text
        self.instead = fallback_text or "ordinary logits"
        if not is_expected:
            fallback_text = fallback_text or "computes ordinary logits and an ordinary loss"
            self.warn_once(f"{fallback_text}: {reason}")

    def warn_once(self, message: str) -> None:
        """Warn of something, once for this model."""
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(f"liger_patch {message}", stacklevel=3)


@dataclass
class TrialRecord(PatchRecord):
    """The record of a forward pass that is only run to be compared: its head computes in a wider
    dtype. It gives no warnings.

    Attributes:
        defers: whether its logits stay deferred, for the fused loss; real ones are for the own.
        rounding: what one rounding may do to the loss.
    """

    defers: bool = True
    rounding: float = 0.0

    def note(self, reason: str | None, fallback_text: str | None = None) -> None:
        """Note why a loss is not fused, None where it is."""
        self.fused, self.reason = reason is None, reason
