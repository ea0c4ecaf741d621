"""Distillation of one patched model from another, without the logits of either.

    with deferred_logits():
        outputs = student(**inputs)
        with torch.no_grad():
            teachers = teacher(**inputs)
    loss = distillation_loss(outputs, teachers, labels, divergence="jsd")

B: sequences, T: tokens of each, V: vocabulary.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_patch.deferred.fuse import HeadProduct, operator_arguments, read_record
from liger_patch.deferred.record import real
from liger_patch.deferred.tensor import DeferredLogits, ancestry, is_foreign, prepare_backward
from liger_patch.deferred.tensor_parallel import is_dtensor
from liger_patch.kernels import reference
from liger_patch.kernels.backend import accumulation_dtype, autocast_to
from liger_patch.kernels.head.divergences import checked_divergence
from liger_patch.kernels.linear_distillation import linear_distillation
from liger_patch.patch import flags
from liger_patch.patch.forward import WHY_REAL
from liger_patch.patch.loss import ForwardPass
from liger_patch.patch.packing import IGNORE_INDEX, next_labels

INSTEAD = "computes the distillation loss from real logits"
NOT_DEFERRED = (
    "they are real logits: call models that apply_patch has patched, in deferred_logits()"
)


def distillation_loss(
    student_outputs: Any,
    teacher_outputs: Any,
    labels: Tensor | None = None,  # (B, T)
    *,
    ignore_index: int = IGNORE_INDEX,
    token_weight: Tensor | None = None,  # (B, T)
    divergence: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: Tensor | int | None = None,
    chunk_mib: float | None = None,
) -> Tensor:
    """Compute the divergence of a student from a teacher, from their deferred logits.

    Gradients flow to the student's hidden states, head, and adapters on it; the teacher gets none.
    Logits that cannot be fused are computed, and one warning says why.

    Args:
        student_outputs, teacher_outputs: what two patched models (or one, with and without its
            adapters) have returned for the same tokens within ``deferred_logits()``; a call with
            labels will do, but computes a loss of its own. Or their logits (B, T, V).
        labels: (B, T) as given to a model: the token before a label predicts it, and counts where
            the label is not ``ignore_index``. Without labels every token counts, padding too.
        token_weight: (B, T) factor on the loss of each label, shifted as these are.
        divergence, beta, temperature, ce_weight, reduction, num_items_in_batch, chunk_mib: as in
            ``linear_distillation``. Biases, softcaps and scales are read from the outputs.

    Returns:
        () float32, float64 for float64 models; 0 where no token counts.

    Raises:
        ValueError: shapes or values that do not fit.
        RuntimeError: logits that are not fused, with LIGER_PATCH_RETURN_LOGITS=0.
    """
    what = checked_divergence(divergence, beta, temperature, ce_weight, reduction, labels)
    student = _logits_of("student_outputs", student_outputs)
    teacher = _logits_of("teacher_outputs", teacher_outputs)
    if student.shape[:2] != teacher.shape[:2]:
        raise ValueError(
            f"teacher_outputs must be of the tokens {tuple(student.shape[:2])} of student_outputs, "
            f"got {tuple(teacher.shape[:2])}"
        )
    for name, each in (("labels", labels), ("token_weight", token_weight)):
        if each is not None and not isinstance(each, Tensor):
            raise ValueError(f"{name} must be a tensor, got {each!r}")
        if each is not None and each.shape != student.shape[:2]:
            raise ValueError(
                f"{name} must have shape {tuple(student.shape[:2])}, got {tuple(each.shape)}"
            )
    if type(ignore_index) is not int:
        raise ValueError(f"ignore_index must be an integer, got {ignore_index!r}")
    if labels is not None:
        labels = next_labels(labels, ignore_index).reshape(-1).to(student.device)
    if token_weight is not None:
        token_weight = pad(token_weight[:, 1:], (0, 1)).reshape(-1).to(student.device)
    options: dict[str, Any] = {
        "labels": labels,
        "divergence": divergence,
        "temperature": temperature,
        "ce_weight": ce_weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }
    products = _products(student, teacher)
    if isinstance(products, str):
        _note(student, products)
        return _of_real_logits(real(student), real(teacher), beta=what.beta, **options)
    deferred = cast(DeferredLogits, student)
    return _fused(deferred, *products, beta=beta, chunk_mib=chunk_mib, **options)


def _logits_of(name: str, outputs: Any) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        kind = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"{name} must have logits of shape (B, T, V), got {kind}")
    if hasattr(logits, "device_mesh"):
        raise ValueError(f"{name} must have whole logits, got a vocabulary distributed over ranks")
    return logits


def _products(student: Tensor, teacher: Tensor) -> tuple[HeadProduct, HeadProduct] | str:
    """Return what both logits are made of, or why they are not fused."""
    products = []
    for name, logits in (("student", student), ("teacher", teacher)):
        product = _product(logits)
        if isinstance(product, str):
            return f"of the {name}'s logits, {product}"
        products.append(product)
    ours, theirs = products
    dtype = theirs.autocast_dtype or theirs.weight.dtype
    if ours.autocast_dtype not in (None, dtype):
        return (
            f"autocast to {ours.autocast_dtype} is the student's alone: load the teacher in that "
            "dtype, or call it under autocast too"
        )
    if theirs.autocast_dtype != ours.autocast_dtype:
        tensors = (each.to(dtype) if isinstance(each, Tensor) else each for each in theirs[:3])
        theirs = theirs._replace(**dict(zip(HeadProduct._fields, tensors, strict=False)))
    return ours, theirs


def _product(logits: Tensor) -> HeadProduct | str:
    if not isinstance(logits, DeferredLogits):
        return vars(logits).get(WHY_REAL, NOT_DEFERRED)
    record = cast(ForwardPass, logits.head_call.owner).record
    if not record.tested and record.compared is None:
        return f"{record.architecture} is not tested: call it with labels once, which compares it"
    if any(map(is_foreign, ancestry(logits))):
        of = "ZeRO-3, DDP with unused parameters or a static graph"
        return f"another autograd function has returned them ({of})"
    product = read_record(logits)
    if product is None:
        return "they were read, or the model does more to them than a fused loss can follow"
    if is_dtensor(product.weight):
        return "the vocabulary is distributed over ranks"
    return product


def _note(student: Tensor, reason: str) -> None:
    """Say why the logits are computed: to the student's record, where there is one."""
    if isinstance(student, DeferredLogits):
        cast(ForwardPass, student.head_call.owner).record.note(reason, INSTEAD)
    elif flags.return_logits() is False:
        raise RuntimeError(f"LIGER_PATCH_RETURN_LOGITS=0 demands the fused loss, but {reason}")
    elif flags.return_logits() is None:
        _warn_once(reason)


def _fused(
    logits: DeferredLogits, student: HeadProduct, teacher: HeadProduct, **options: Any
) -> Tensor:
    forward_pass = cast(ForwardPass, logits.head_call.owner)
    ours, theirs = operator_arguments(student), operator_arguments(teacher)
    heads: dict[str, Any] = {}
    for prefix, arguments in (("", ours), ("teacher_", theirs)):
        del arguments["vocab_shard"]
        of_head = prefix or "student_"
        heads[f"{of_head}hidden"] = arguments.pop("hidden_states")
        heads[f"{of_head}weight"] = arguments.pop("weight")
        heads |= {f"{prefix}{name}": value for name, value in arguments.items()}
    if options["chunk_mib"] is None:
        options["chunk_mib"] = forward_pass.chunk_mib
    forward_pass.record.before_loss()
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    device_type = student.weight.device.type
    with torch.set_grad_enabled(differentiable), autocast_to(device_type, student.autocast_dtype):
        loss = linear_distillation(**heads, **options)
    prepare_backward(loss, logits)
    forward_pass.record.note(None)
    return loss


def _of_real_logits(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None,
    **options: Any,
) -> Tensor:
    dtype = accumulation_dtype(torch.promote_types(student.dtype, teacher.dtype))
    rows = student.reshape(-1, student.shape[-1])
    teachers = teacher.detach().reshape(-1, teacher.shape[-1]).to(rows.device)
    if labels is not None:
        supervised = labels != options["ignore_index"]
        rows, teachers, labels = rows[supervised], teachers[supervised], labels[supervised]
        if options["token_weight"] is not None:
            options["token_weight"] = options["token_weight"][supervised]
    return reference.distillation(rows.to(dtype), teachers.to(dtype), labels, **options)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"liger_patch {INSTEAD}: {reason}", stacklevel=4)
