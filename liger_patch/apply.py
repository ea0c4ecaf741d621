"""Patch one model, and undo that: the public functions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedModel

from liger_patch import registry
from liger_patch.layers.replace import (
    LAYERS,
    candidates,
    count_layers,
    replace_layers,
    restore_layers,
)
from liger_patch.patch import flags
from liger_patch.patch.forward import RECORD, leads_to_patch, patched_class, record_of
from liger_patch.patch.offload import CheckpointOffload
from liger_patch.patch.settings import LossSettings, PatchRecord
from liger_patch.readers.wrapped_model import transformers_model
from liger_patch.subclass import ORIGINAL, count_replacements, original_class

Model = TypeVar("Model", bound=nn.Module)
ACTIVATION = "; its activation must be silu or gelu, with no dropout after it"
NEEDS = {  # what layers of a kind need besides what all do
    "gated": ACTIVATION,
    "experts": ACTIVATION,
    "attention": "; it must be causal and take its function from Transformers' table",
    "delta_net": "; it needs Transformers 5.15 (installed: "
    f"{transformers.__version__}) and no flash-linear-attention that trains here",
}


def apply_patch(
    model: Model,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_mib: float | None = None,
    reduction: str = "mean",
    layers: bool | Collection[str] = True,
    checkpoint_offload: bool | float = False,
    strict: bool = False,
) -> Model:
    """Make this one model compute its loss without holding its logits, and its layers on kernels.

    A call with labels runs the model's own forward. Its loss comes from ``linear_cross_entropy``,
    and ``outputs.logits`` are computed lazily. A call without labels differs only in ``layers`` and
    ``checkpoint_offload``.

    - Packed rows: where position ids that restart, ``cu_seq_lens_q`` or ``seq_idx`` say that rows
      hold several sequences, no token predicts the first token of the next sequence.
    - ``loss_weights`` (B, T), an argument beside labels (B, T), weighs each token's loss: the mean
      is then the weighted mean.
    - Patching a patched model again replaces all options.

    Args:
        model: a Transformers model, or a PEFT wrapper around one. An architecture without a row in
            ``liger_patch.registry``, or whose class has a forward of its own, is compared with the
            ordinary path at its first call with labels. A warning says the result; if the losses
            differ, no loss is fused.
        label_smoothing: share of the target spread over the vocabulary, in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss.
        chunk_mib: MiB of logits held at once; by default 512, or 256 where the head is frozen. The
            environment variable LIGER_PATCH_CHUNK_MIB overrides it.
        reduction: "mean" or "sum" over the supervised tokens, where the call brings no
            ``num_items_in_batch``.
        layers: which layers run on kernels too: True for all that have one, False for none, or
            some of "rms_norm", "rotary", "attention", "gated", "experts", "recurrent", "delta_net"
            and "lora". These run in calls without labels too. LoRA adapters may be added later:
            the next call finds them.
        checkpoint_offload: whether the inputs of checkpointed layers wait for the backward pass in
            pinned host memory: True for as much of it as the system has available, or GiB that this
            process may take at most. What does not fit stays on the GPU, with one warning.
            Gradients stay the same bit for bit. For GPUs, and for layers that ``torch.compile``
            does not trace; elsewhere checkpoints stay as they are.
        strict: whether an architecture without a row, or a class with a forward of its own, is an
            error. LIGER_PATCH_STRICT=1 does so too.

    Returns:
        The same object.

    Raises:
        ValueError: an option is out of range; or, with ``strict``, the architecture has no row in
            the registry, or its class has a forward of its own.
        TypeError: not a Transformers model.
        RuntimeError: something has given a patched layer another class since (FSDP, say).
    """
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    flags.warn_of_unknown()
    settings = LossSettings(label_smoothing, z_loss, chunk_mib, reduction)
    names = checked_layers(layers, checkpoint_offload)
    asked = layers if isinstance(layers, bool) else names
    target = transformers_model(model)
    record = record_of(target)
    row = registry.find(target) if strict or flags.strict() else registry.row_of(target)
    replacements = count_replacements()
    _choose_layers(target, row, layers, names)
    if record is not None:
        record.replacements = replacements
        record.settings, record.layers, record.adapters = settings, asked, None
        record.unpacks = count_layers(target)["recurrent"]
        record.verified, record.compared, record.distrusted = False, None, None
        record.differs = False
        _set_offload(record, checkpoint_offload)
        return model
    patched = type(target)
    if not hasattr(patched, ORIGINAL):  # type(patched model).from_pretrained(...) has it already
        patched = patched_class(patched)
    tested = registry.is_tested(target)
    own = " with a forward of its own" if row is not None and not tested else ""
    record = PatchRecord(
        settings,
        tested=tested,
        architecture=f"{type(target).__name__} ({target.config.model_type}){own}",
        layers=asked,
        replacements=replacements,
        unpacks=count_layers(target)["recurrent"],
    )
    _set_offload(record, checkpoint_offload)
    if "forward" in vars(target) and not leads_to_patch(vars(target)["forward"], patched):
        record.replaced_forward = vars(target).pop("forward")
    setattr(target, RECORD, record)
    target.__class__ = patched
    return model


def checked_layers(
    layers: bool | Collection[str], checkpoint_offload: bool | float
) -> frozenset[str]:
    """Return the names of layers; check these options of ``apply_patch``, for any model.

    Raises:
        ValueError: an option is out of range.
    """
    most = sys.float_info.max  # an int may be too large for a float
    if not isinstance(checkpoint_offload, bool) and not (
        isinstance(checkpoint_offload, Real) and 0 < checkpoint_offload <= most
    ):
        raise ValueError(
            "checkpoint_offload must be True, False or a finite number of GiB > 0, got "
            f"{checkpoint_offload!r}"
        )
    if isinstance(layers, bool):
        return frozenset(LAYERS if layers else ())
    several = isinstance(layers, Collection) and not isinstance(layers, (str, bytes, Mapping))
    names: Any = layers if several else (layers,)
    if not all(name in LAYERS for name in names):
        raise ValueError(f"layers must be True, False or some of {LAYERS}, got {layers!r}")
    return frozenset(names)


def _choose_layers(
    model: PreTrainedModel,
    row: registry.Architecture | None,
    layers: bool | Collection[str],  # as apply_patch was given them
    names: frozenset[str],  # the same, as names
) -> None:
    """Put the layers of these names on kernels, and give all other layers their own class back.

    Raises:
        ValueError: ``layers`` names a kind that the model does not have, and nothing has changed.
    """
    is_explicit = layers is not True
    before = frozenset(name for name, count in count_layers(model).items() if count)
    replace_layers(model, names | before, everywhere=is_explicit)
    counts = count_layers(model)
    lacking = [n for n in sorted(names) if n != "lora" and not counts[n]]  # adapters may come later
    if lacking and is_explicit:
        restore_layers(model, names - before)
        raise ValueError(
            f"layers={layers!r}, but {type(model).__name__} has no {' and no '.join(lacking)} "
            "layer that has a kernel. Its class must be Transformers' own, or a subclass with "
            "its forward and the ending of its name, and have no hook of accelerate"
            f"{''.join(NEEDS.get(name, '') for name in lacking)}"
        )
    restore_layers(model, frozenset(LAYERS) - names)
    # not in a Transformers that is older than some rows: its layers have other classes
    if lacking and row is not None and not registry.missing():
        promised = candidates(model).intersection(row.kinds.split())
        # their activation may have no kernel, and a library may have the third one's
        promised -= {"gated", "experts", "delta_net"}
        if gone := [name for name in lacking if name in promised]:
            warnings.warn(
                f"liger_patch runs no {' and no '.join(gone)} layer of {type(model).__name__} on "
                "kernels, as it does where this architecture is tested: Transformers "
                f"{transformers.__version__}, the configuration or another library changes them",
                stacklevel=3,
            )


def _set_offload(record: PatchRecord, wanted: bool | float) -> None:
    before, host_gib = record.offload, None if isinstance(wanted, bool) else float(wanted)
    if before is not None:
        is_same = wanted is not False and before.host_gib == host_gib
        if is_same and not before.has_failed:
            return
        before.free()  # after the system has refused memory, a new one asks again
    record.offload = None if wanted is False else CheckpointOffload(host_gib=host_gib)


def revert_patch(model: Model) -> Model:
    """Give the model back its own class and forward. A model that is not patched stays as it is.

    Raises:
        TypeError: not a Transformers model.
        RuntimeError: the instance or one of its layers was given another class since (by FSDP's
            ``fully_shard``, say).
    """
    target = transformers_model(model)
    record = record_of(target)
    if record is None:
        return model
    original = original_class(target)
    if type(target) is not patched_class(original):
        raise RuntimeError(
            f"{type(target).__name__} was given another class after apply_patch "
            f"({type(target).__mro__[1]}): undo that before revert_patch"
        )
    restore_layers(target)
    _set_offload(record, False)
    target.__class__ = original
    delattr(target, RECORD)
    if record.replaced_forward is not None:
        if leads_to_patch(vars(target).get("forward"), patched_class(original)):
            # accelerate has wrapped the patched class's forward since: without the patch, that
            # wrapper would call nothing
            del target.forward
            vars(target).pop("_original_forward", None)
        vars(target).setdefault("forward", record.replaced_forward)
    return model
