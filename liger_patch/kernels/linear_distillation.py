"""The divergence of a student's head from a teacher's, and its gradients, without (N, V) logits.

N: tokens, n: supervised tokens, H and H2: hidden sizes of student and teacher, V: vocabulary.
Ignored tokens are dropped. For each chunk of tokens, as in ``head/chunked``:

    logits = X_c W^T, the teacher's too   two products, into two buffers that every chunk reuses
    logits -> losses, G in place          G = dloss/dlogits of the student: ``head/divergences``
    dX_c = G W,  dW += G^T X_c            two products

four products, three with a frozen head of the student, two without gradients. Gradients are
computed in the forward pass, and again in the backward pass where ``linear_cross_entropy`` does so.
Extra memory: the gradients themselves and the logits of one chunk, of both.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import check_backward, check_plain_tensors, without_autocast
from liger_patch.kernels.graphs import runs_eagerly
from liger_patch.kernels.head.chunked import (
    ChunkConfig,
    bounds_of,
    check_arguments,
    empty_logits,
    row_elements,
)
from liger_patch.kernels.head.divergences import Divergence, divergence_rows_
from liger_patch.kernels.head.gradients import Gradients, scale_
from liger_patch.kernels.head.inputs import (
    HeadInputs,
    Surroundings,
    Wanted,
    checked_chunk_bytes,
    checked_inputs,
    product_dtype,
    save_inputs,
    saved_values,
)
from liger_patch.kernels.head.labels import compact_labels
from liger_patch.kernels.head.logits import logits_
from liger_patch.kernels.head.losses import loss_factors
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.products import QuantizedWeight

NO_LABELS = -100  # ignore_index where no labels are given
ADVICE = "Compute the divergence of logits of your own for that."
HEAD = len(HeadInputs._fields)


@dataclass(frozen=True)
class DistillationConfig:
    """The configuration of one call, for each pass through its chunks.

    Attributes:
        chunks: those of the student; its labels are in the common part of both vocabularies.
        teacher_options: softcap and scale of the teacher's logits.
        teacher_dtype: of the teacher's products.
        divergence: what is computed of each token.
        vocab_size: classes of both: the first ones.
    """

    chunks: ChunkConfig
    teacher_options: LossOptions
    teacher_dtype: torch.dtype
    divergence: Divergence
    vocab_size: int


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        config: DistillationConfig,
        factors: Tensor,  # (N,) of each token's loss, in the order of the compacted labels
        *inputs: Any,  # of the student's head, then of the teacher's
    ) -> Tensor:
        in_forward = config.chunks.has_gradients_in_forward(same_for_all=True)
        wanted = config.chunks.wanted if in_forward else Wanted()
        losses, gradients = _run_chunks(config, inputs, factors, wanted)
        ctx.config, ctx.factors = config, factors
        ctx.gradients = gradients if in_forward else None
        save_inputs(ctx, inputs, config.chunks.options)
        return (losses * factors[: len(losses)]).sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("linear_distillation", grad_output, advice=ADVICE)
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            inputs, _ = saved_values(ctx)
            wanted = ctx.config.chunks.wanted
            _, gradients = _run_chunks(ctx.config, inputs, ctx.factors * grad_output, wanted)
        else:
            scale_([each for each in gradients if each is not None], grad_output)
        return None, None, *gradients, *[None] * HEAD


def _run_chunks(
    config: DistillationConfig, inputs: Any, row_scale: Tensor, wanted: Wanted
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses of the supervised tokens (n,), unscaled, and the gradients of the sum of
    ``row_scale * losses``.
    """
    student, teacher = HeadInputs(*inputs[:HEAD]), HeadInputs(*inputs[HEAD:])
    chunks, common = config.chunks, config.vocab_size
    labels, classes = chunks.labels, student.weight.shape[0]
    row_bytes = row_elements(classes, labels.labels) * chunks.dtype.itemsize
    n = labels.read_count()
    rows = labels.supervised_rows
    bounds, sum_dtype = bounds_of(chunks, student.weight, classes, wanted, n, row_bytes)
    most = bounds[0][1] if bounds else 0
    losses = [row_scale.new_empty(0)]
    with without_autocast(student.hidden_states.device.type):
        operands = student.to(chunks.dtype), teacher.to(config.teacher_dtype)
        memory = [empty_logits(each.hidden_states, most, each.weight.shape[0]) for each in operands]
        gradients = Gradients(student, operands[0], rows, wanted, sum_dtype, None, None)
        logits = None
        for start, stop in bounds:
            chunk = slice(start, stop)
            of_chunk = [each.of(chunk if rows is None else rows[chunk]) for each in operands]
            logits = [logits_(m[: stop - start], x) for m, x in zip(memory, of_chunk, strict=True)]
            losses.append(
                divergence_rows_(
                    logits[0][:, :common],
                    logits[1][:, :common],
                    labels.labels[chunk],
                    chunks.options,
                    config.teacher_options,
                    config.divergence,
                    row_scale[chunk] if any(wanted) else None,
                )
            )
            if any(wanted):
                logits[0][:, common:].zero_()
                gradients.add(of_chunk[0], logits[0], chunk)
        memory = logits = None  # freed before a float32 dweight is rounded
        return torch.cat(losses), gradients.finish()


def linear_distillation(
    student_hidden: Tensor,  # (N, H)
    student_weight: Tensor | QuantizedWeight,  # (V, H)
    teacher_hidden: Tensor,  # (N, H2)
    teacher_weight: Tensor | QuantizedWeight,  # (V, H2)
    labels: Tensor | None = None,  # (N,)
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    bias: Tensor | None = None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_bias: Tensor | None = None,  # (V,)
    teacher_low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    chunk_mib: float | None = None,
) -> Tensor:
    """Compute the divergence of two heads' distributions, and its gradients for the student's.

    Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the divergence is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype; the teacher gets none. ``torch.compile``
    breaks the graph here.

    Class i of both heads must be the same token: two tokenizers cannot be told apart here. Of
    vocabularies of different size, which a model's padding makes, the first min(V) classes are
    compared, as if there were no others.

    Args:
        student_hidden, student_weight, bias, low_rank, softcap, logit_scale: the student's head, as
            ``hidden_states`` and so on of ``linear_cross_entropy``.
        teacher_hidden, teacher_weight, ...: the teacher's, of its own hidden size and dtype, on the
            same device.
        labels: (N,) integers in [0, min(V)), or ``ignore_index`` where a token does not count. All
            tokens count without labels.
        divergence: "forward_kl", KL(teacher, student); "reverse_kl", KL(student, teacher); "jsd",
            the generalized Jensen-Shannon divergence of GKD and TRL; "tvd", the total variation
            distance.
        beta: of the JSD, in [0, 1]: the teacher's share of the mixture; 0 is forward KL, 1 reverse.
        temperature: > 0, divides both logits, after the softcap. The loss is not multiplied by
            its square.
        ce_weight: >= 0, factor of the cross entropy with the labels, at temperature 1, which is
            added.
        reduction: "mean" or "sum" over the tokens that count.
        token_weight: (N,) factor on each token's loss; the mean is then the weighted mean.
        num_items_in_batch: denominator of the mean instead of the (weighted) number of tokens; 0
            counts as 1.
        chunk_mib: MiB of the student's logits held at once, as in ``linear_cross_entropy``; the
            teacher's of the same tokens come on top.

    Returns:
        () float32, float64 for float64 inputs; 0 where no token counts.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    how = Divergence(divergence, beta, temperature, ce_weight)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if labels is None and ce_weight:
        raise ValueError(f"ce_weight={ce_weight} needs labels, got None")
    options = LossOptions(ignore_index, softcap, logit_scale)
    with _named("teacher_"):
        teacher_options = LossOptions(softcap=teacher_softcap, logit_scale=teacher_logit_scale)
    return _call(
        (student_hidden, student_weight, bias, low_rank),
        (teacher_hidden, teacher_weight, teacher_bias, teacher_low_rank),
        labels,
        options,
        teacher_options,
        how,
        chunk_mib,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )


@runs_eagerly
def _call(
    student: tuple[Any, ...],
    teacher: tuple[Any, ...],
    labels: Tensor | None,
    options: LossOptions,
    teacher_options: LossOptions,
    divergence: Divergence,
    chunk_mib: float | None,
    **how: Any,
) -> Tensor:
    hidden_states, weight, bias, low_rank = student
    if labels is None and isinstance(hidden_states, Tensor):
        options = replace(options, ignore_index=NO_LABELS)
        labels = hidden_states.new_zeros(hidden_states.shape[:1], dtype=torch.int64)
    with _named("student_"):
        arguments = hidden_states, weight, labels, bias, low_rank, options
        inputs = check_arguments(*arguments, **how)  # pyright: ignore[reportArgumentType]
        wanted, autocast = Surroundings.by(inputs)
        dtype = product_dtype(inputs, autocast)
    with _named("teacher_"):
        check_plain_tensors(hidden_states=teacher[0], bias=teacher[2])
        others = checked_inputs(*teacher, None)  # pyright: ignore[reportCallIssue]
        teacher_inputs = _without_gradients(others)
        teacher_dtype = product_dtype(teacher_inputs, autocast)
    assert labels is not None
    tokens, device = len(labels), labels.device
    if (len(teacher[0]), teacher[0].device) != (tokens, device):
        raise ValueError(
            f"teacher_hidden must have {tokens} rows on {device} as student_hidden has, got "
            f"{tuple(teacher[0].shape)} on {teacher[0].device}"
        )
    common = min(inputs.weight.shape[0], teacher_inputs.weight.shape[0])
    chunks = ChunkConfig(
        compact_labels(labels, common, options.ignore_index),
        options,
        wanted,
        dtype,
        checked_chunk_bytes(chunk_mib, trains_weight=wanted.weight),
    )
    config = DistillationConfig(chunks, teacher_options, teacher_dtype, divergence, common)
    factors = loss_factors(chunks, labels, **how)
    return _LinearDistillation.apply(config, factors, *inputs, *teacher_inputs)


def _without_gradients(inputs: HeadInputs) -> HeadInputs:
    values: list[Any] = [each.detach() if isinstance(each, Tensor) else each for each in inputs]
    return HeadInputs(*values)


@contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Name the arguments of one head in errors as this operator does."""
    try:
        yield
    except ValueError as error:
        names = "weight" if prefix == "student_" else "weight|bias|softcap|logit_scale|low_rank"
        message = re.sub(r"\bhidden_states\b", f"{prefix}hidden", str(error))
        raise ValueError(re.sub(rf"\b({names})\b", rf"{prefix}\1", message)) from None
