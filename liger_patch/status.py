"""What is patched of a model, what falls back to ordinary logits, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_patch import registry
from liger_patch.kernels import fp8
from liger_patch.kernels.head.inputs import default_chunk_mib
from liger_patch.layers import checks
from liger_patch.layers.attention import with_masks
from liger_patch.layers.delta_net import of_libraries
from liger_patch.layers.experts import own_implementations
from liger_patch.layers.lora import not_plain
from liger_patch.layers.quantized_base import Fp8Linear
from liger_patch.layers.recurrent import ways_of_packed_rows
from liger_patch.layers.replace import count_layers
from liger_patch.patch import flags
from liger_patch.patch.adapters import follow_adapters
from liger_patch.patch.fallback import class_name
from liger_patch.patch.forward import leads_to_patch, record_of
from liger_patch.patch.settings import LossSettings, PatchRecord
from liger_patch.readers.wrapped_model import transformers_model


@dataclass(frozen=True)
class PatchStatus:
    """The result of ``patch_status``; ``str()`` of it is a table, as a notebook shows it too.

    Attributes:
        patched: whether the model is patched.
        fused: whether its last loss was fused; None before the first call with labels, or False
            where TRL or Liger-Kernel has replaced its forward.
        reason: why its last loss was not fused, or which forward may keep calls from the patched
            one; None if it was fused, or before the first call.
        rows: (name, value) of each line of the table.
        architecture: "tested"; or, without a row in the registry or with a forward of its own, "not
            tested", "verified" once its loss was compared, "differs" where that found a
            difference, or "not fusable" where nothing can be compared: its loss reads the logits,
            or has nothing to do with those of the head.
    """

    patched: bool
    fused: bool | None
    reason: str | None
    rows: tuple[tuple[str, str], ...]
    architecture: str = "tested"

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def patch_status(model: nn.Module) -> PatchStatus:
    """Return what is fused for this model, what falls back to ordinary logits, and why.

    Adapters that came after ``apply_patch`` are put on kernels first, as the next call would.

    Raises:
        TypeError: not a Transformers model.
    """
    target = transformers_model(model)
    record = record_of(target)
    rows = [("model", f"{type(target).__name__} ({target.config.model_type})")]
    if record is None:
        architecture = "tested" if registry.is_tested(target) else "not tested"
        return PatchStatus(False, None, None, (*rows, ("patched", "no")), architecture)
    follow_adapters(target, record)
    architecture = _architecture_status(record)
    compared = f": {record.compared}" if architecture == "verified" else ""
    rows.append(("architecture", architecture + compared))
    head = target.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):  # a method, where torch.ao has quantized the head
        weight = None
    other = record.fused_head_call
    reason, forward = record.reason, vars(target).get("forward")
    not_yet = "no call with labels yet"
    if record.fused is None and forward is not None and not leads_to_patch(forward, type(target)):
        of = getattr(forward, "__module__", type(forward).__name__)
        reason = f"the model has got another forward, of {of}, which may not call the patched one"
        not_yet += f": {reason}"
    verdict = {
        None: not_yet,
        True: "fused",
        False: f"{record.instead}: {reason}",
    }
    trains = weight is not None and weight.requires_grad
    counts = count_layers(target)
    chunk_mib = record.chunk_mib or default_chunk_mib(trains)
    return PatchStatus(
        True,
        record.fused,
        reason,
        (
            *rows,
            ("patched", "yes"),
            ("head", _described_head(head, weight)),
            ("last loss", verdict[record.fused]),
            *(() if other is not None else loss_rows(record.settings)),
            ("layers", ", ".join(f"{n} {layer}" for layer, n in counts.items() if n) or "its own"),
            *(("", note) for note in _layer_notes(target, record)),
            ("checkpoint offload", "off" if record.offload is None else str(record.offload)),
            ("logits held", f"{chunk_mib:g} MiB a chunk"),
            (
                "LIGER_PATCH_RETURN_LOGITS",
                {None: "unset", True: "1", False: "0"}[flags.return_logits()],
            ),
        ),
        architecture,
    )


def _described_head(head: nn.Module | None, weight: Tensor | None) -> str:
    """Return the class of the head, and the shape (V, H), dtype and device of its weight."""
    if head is None:
        return "none"
    if weight is None:
        return class_name(head)
    shape = tuple(weight.shape)
    if not weight.is_floating_point():  # quantized: packed in a shape of its own
        shape = (getattr(head, "out_features", "?"), getattr(head, "in_features", "?"))
    return f"{class_name(head)} {shape} {weight.dtype} {weight.device}"


def _architecture_status(record: PatchRecord) -> str:
    """Return ``PatchStatus.architecture`` of a patched model."""
    if record.tested:
        return "tested"
    if record.distrusted is not None:
        return "differs" if record.differs else "not fusable"
    return "verified" if record.verified else "not tested"


def _layer_notes(model: PreTrainedModel, record: PatchRecord) -> Iterator[str]:
    """Yield what a reader must know of the layers."""
    device = next((each.device.type for each in model.parameters()), "cpu")
    waits = record.layers is True and device not in checks.DEVICES  # see is_left_to_model
    if waits and any(count_layers(model).values()):
        yield f"calls on {device} run the model's own layers: no kernels for this device"
    held = [each for each in model.modules() if isinstance(each, Fp8Linear)]
    if held:  # results are not as exact as eager's
        rounded = "weights"
        if fp8.has_fp8(held[0].numbers.device):
            rounded += ", and in bf16 activations and gradients, a row at a time"
        yield f"{len(held)} linear in FP8, which rounds {rounded}"
    if (ranks := model.tp_size or 1) > 1:
        why = f"its tensor-parallel plan splits them over {ranks} ranks"
        yield f"projections run Transformers' own code: {why}"
    for counted, words in (
        (not_plain, "in PEFT's own forward: {}"),
        (ways_of_packed_rows, "recurrent: {}"),
        (of_libraries, "delta_net on {}'s kernels"),
        (own_implementations, "experts in Transformers' own code: {}"),
        (with_masks, "attention with masks: {}"),
    ):
        yield from (f"{n} {words.format(which)}" for which, n in counted(model).items())


def loss_rows(settings: LossSettings) -> tuple[tuple[str, str], ...]:
    """Return a row for each option of the loss."""
    return (
        ("label smoothing", f"{settings.label_smoothing:g}"),
        ("z-loss", f"{settings.z_loss:g}"),
        ("reduction", f"{settings.reduction}, or sum / num_items_in_batch where the call has that"),
    )
