"""The divergence of a student's head from a teacher's, and its gradients, without (N, V) logits.

N: tokens, n: supervised tokens, H and H2: hidden sizes of student and teacher, V: vocabulary.
Ignored tokens are dropped. For each chunk of tokens, as in ``head/chunked``:

    logits = X_c W^T, the teacher's too   two products, into two buffers that every chunk reuses
    logits -> losses, G in place          G = dloss/dlogits of the student: ``head/divergences``
    dX_c = G W,  dW += G^T X_c            two products

four products, three with a frozen head of the student, two without gradients; one less where the
teacher's likeliest classes are given in place of its head. Gradients are computed in the forward
pass, and again in the backward pass where ``linear_cross_entropy`` does so. Extra memory: the
gradients themselves and the logits of one chunk, of both.
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
    loss_factors,
    row_elements,
)
from liger_patch.kernels.head.divergences import (
    Divergence,
    checked_divergence,
    divergence_rows_,
    top_k_rows_,
)
from liger_patch.kernels.head.gradients import Gradients, scale_
from liger_patch.kernels.head.inputs import (
    HeadInputs,
    Surroundings,
    Wanted,
    checked_chunk_bytes,
    checked_inputs,
    product_dtype,
    save_inputs,
)
from liger_patch.kernels.head.labels import compact_labels
from liger_patch.kernels.head.logits import logits_
from liger_patch.kernels.options import LossOptions

NO_LABELS = -100  # ignore_index where no labels are given
ADVICE = "Compute the divergence of logits of your own for that."
HEAD = len(HeadInputs._fields)


@dataclass(frozen=True)
class DistillationConfig:
    """The configuration of one call, for each pass through its chunks.

    Attributes:
        chunks: those of the student; its labels are in the common part of both vocabularies.
        divergence: what is computed of each token.
        vocab_size: classes of both: the first ones.
        teacher_options: softcap and scale of the teacher's logits.
        teacher_dtype: of the teacher's products; None where its likeliest classes are given.
        tail: whether all other classes are one more class then.
        entropy_out: (N,) takes the student's entropies, or None.
    """

    chunks: ChunkConfig
    divergence: Divergence
    vocab_size: int
    teacher_options: LossOptions
    teacher_dtype: torch.dtype | None
    tail: bool
    entropy_out: Tensor | None


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        config: DistillationConfig,
        factors: Tensor,  # (N,) of each token's loss, in the order of the compacted labels
        *inputs: Any,  # of the student's head, then of the teacher's, or its likeliest classes
    ) -> Tensor:
        wanted = config.chunks.wanted
        in_forward = wanted.in_forward(config.chunks.dtype, same_for_all=True)
        wanted = wanted if in_forward else Wanted()
        losses, gradients = _run_chunks(config, inputs, factors, wanted)
        ctx.config, ctx.factors = replace(config, entropy_out=None), factors
        ctx.gradients = gradients if in_forward else None
        save_inputs(ctx, inputs, config.chunks.options)
        return (losses * factors[: len(losses)]).sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("linear_distillation", grad_output, advice=ADVICE)
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            *inputs, _ = ctx.saved_tensors
            wanted = ctx.config.chunks.wanted
            _, gradients = _run_chunks(ctx.config, inputs, ctx.factors * grad_output, wanted)
        else:
            scale_([each for each in gradients if each is not None], grad_output)
        return None, None, *gradients, *[None] * (len(ctx.needs_input_grad) - 2 - HEAD)


def _run_chunks(
    config: DistillationConfig, inputs: Any, row_scale: Tensor, wanted: Wanted
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses of the supervised tokens (n,), unscaled, and the gradients of the sum of
    ``row_scale * losses``. Write the entropies that are asked for.
    """
    student, others = HeadInputs(*inputs[:HEAD]), inputs[HEAD:]
    chunks, common = config.chunks, config.vocab_size
    labels, classes = chunks.labels, student.weight.shape[0]
    row_bytes = row_elements(classes, labels.labels) * chunks.dtype.itemsize
    n = labels.read_count()
    rows = labels.supervised_rows
    bounds, sum_dtype = bounds_of(chunks, student.weight, classes, wanted, n, row_bytes)
    most = bounds[0][1] if bounds else 0
    losses = [row_scale.new_empty(0)]
    entropies = None if config.entropy_out is None else row_scale.new_empty(n)
    with without_autocast(student.hidden_states.device.type):
        operands = [student.to(chunks.dtype)]
        if config.teacher_dtype is not None:
            operands.append(HeadInputs(*others).to(config.teacher_dtype))
        memory = [empty_logits(each.hidden_states, most, each.weight.shape[0]) for each in operands]
        gradients = Gradients(student, operands[0], rows, wanted, sum_dtype, None, None)
        logits = None
        for start, stop in bounds:
            chunk = slice(start, stop)
            which = chunk if rows is None else rows[chunk]
            of_chunk = [each.of(which) for each in operands]
            logits = [logits_(m[: stop - start], x) for m, x in zip(memory, of_chunk, strict=True)]
            scale = row_scale[chunk] if any(wanted) else None
            if config.teacher_dtype is None:
                given = others[0][which], others[1][which], chunks.options
                how = config.divergence.temperature, config.tail, scale
                losses.append(top_k_rows_(logits[0], *given, *how))
            else:
                losses.append(
                    divergence_rows_(
                        logits[0][:, :common],
                        logits[1][:, :common],
                        labels.labels[chunk],
                        chunks.options,
                        config.teacher_options,
                        config.divergence,
                        scale,
                        None if entropies is None else entropies[chunk],
                    )
                )
            if any(wanted):
                logits[0][:, common:].zero_()
                gradients.add(of_chunk[0], logits[0], chunk)
        memory = logits = None  # freed before a float32 dweight is rounded
        if config.entropy_out is not None and entropies is not None:
            config.entropy_out.copy_(labels.scatter(entropies))
        return torch.cat(losses), gradients.finish()


@runs_eagerly
def linear_distillation(
    student_hidden: Tensor,  # (N, H)
    student_weight: Tensor,  # (V, H)
    teacher_hidden: Tensor | None = None,  # (N, H2)
    teacher_weight: Tensor | None = None,  # (V, H2)
    labels: Tensor | None = None,  # (N,)
    *,
    divergence: str = "forward_kl",
    beta: float | None = None,
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
    teacher_log_probs: Tensor | None = None,  # (N, K)
    teacher_indices: Tensor | None = None,  # (N, K)
    tail: bool = True,
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    chunk_mib: float | None = None,
    entropy_out: Tensor | None = None,  # (N,)
) -> Tensor:
    """Compute the divergence of two heads' distributions, and its gradients for the student's.

    Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the divergence is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype; the teacher gets none. ``torch.compile``
    breaks the graph here; ``torch.export``, ``make_fx`` and ``FakeTensorMode`` get an error.

    Class i of both heads must be the same token: two tokenizers cannot be told apart here. Of
    vocabularies of different size, which a model's padding makes, the first min(V) classes are
    compared, as if there were no others.

    Args:
        student_hidden, student_weight, bias, low_rank, softcap, logit_scale: the student's head, as
            ``hidden_states`` and so on of ``linear_cross_entropy``.
        teacher_hidden, teacher_weight, ...: the teacher's, of its own hidden size and dtype, on the
            same device. None for both, with ``teacher_log_probs``.
        teacher_log_probs, teacher_indices: (N, K) log-probabilities of the teacher's likeliest
            classes, at this temperature and in its whole vocabulary, and which classes these are,
            distinct for each token: from a server or a disk, for forward KL without ``ce_weight``.
            A log-probability may be -inf, and that of ignored tokens anything.
        tail: whether all other classes count as one more class. False leaves them out: a student
            that has learned all is then not at 0, nor at a minimum.
        labels: (N,) integers in [0, min(V)), or ``ignore_index`` where a token does not count. All
            tokens count without labels.
        divergence: "forward_kl", KL(teacher, student); "reverse_kl", KL(student, teacher); "jsd",
            the generalized Jensen-Shannon divergence of GKD and TRL; "tvd", the total variation
            distance.
        beta: of the JSD alone, in [0, 1]: the teacher's share of the mixture; 0 is forward KL, 1
            reverse, None 0.5.
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
        entropy_out: takes the entropies of the student's distributions at this temperature, in
            nats, without gradient; 0 where a token does not count. Not with ``teacher_log_probs``.

    Returns:
        () float32, float64 for float64 inputs; 0 where no token counts.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    what = checked_divergence(divergence, beta, temperature, ce_weight, reduction, labels)
    options = LossOptions(ignore_index, softcap, logit_scale)
    with _named("teacher_"):
        teacher_options = LossOptions(softcap=teacher_softcap, logit_scale=teacher_logit_scale)
    if labels is None and isinstance(student_hidden, Tensor):
        options = replace(options, ignore_index=NO_LABELS)
        labels = student_hidden.new_zeros(student_hidden.shape[:1], dtype=torch.int64)
    how: dict[str, Any] = {
        "reduction": reduction,
        "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }
    with _named("student_"):
        arguments = student_hidden, student_weight, labels, bias, low_rank, options
        inputs = check_arguments(*arguments, **how)  # pyright: ignore[reportArgumentType]
        wanted, autocast = Surroundings.by(inputs)
        dtype = product_dtype(inputs, autocast)
    assert labels is not None
    common, teacher_dtype = inputs.weight.shape[0], None
    teacher = teacher_hidden, teacher_weight, teacher_bias, teacher_low_rank
    if entropy_out is not None:
        check_plain_tensors(entropy_out=entropy_out)
        dtype_out, expected = entropy_out.dtype, tuple(labels.shape)
        if not dtype_out.is_floating_point or entropy_out.shape != labels.shape:
            got = f"{dtype_out} {tuple(entropy_out.shape)}"
            raise ValueError(f"entropy_out must be floating-point {expected}, got {got}")
    if teacher_log_probs is not None or teacher_indices is not None:
        given = teacher_log_probs, teacher_indices
        others = _checked_top_k(*given, inputs, teacher, what, entropy_out)
    else:
        others = _checked_teacher(teacher, labels)
        with _named("teacher_"):
            teacher_dtype = product_dtype(others, autocast)
        common = min(common, others.weight.shape[0])
    chunks = ChunkConfig(
        compact_labels(labels, common, options.ignore_index),
        options,
        wanted,
        dtype,
        checked_chunk_bytes(chunk_mib, trains_weight=wanted.weight),
    )
    config = DistillationConfig(
        chunks, what, common, teacher_options, teacher_dtype, tail, entropy_out
    )
    factors = loss_factors(chunks, labels, **how)
    return _LinearDistillation.apply(config, factors, *inputs, *others)


def _checked_teacher(teacher: tuple[Any, ...], labels: Tensor) -> HeadInputs:
    """Return the inputs of the teacher's head without gradients."""
    hidden_states, weight, bias, low_rank = teacher
    with _named("teacher_"):
        inputs = checked_inputs(hidden_states, weight, bias, low_rank, None)
    if (len(hidden_states), hidden_states.device) != (len(labels), labels.device):
        raise ValueError(
            f"teacher_hidden must have {len(labels)} rows on {labels.device} as student_hidden "
            f"has, got {tuple(hidden_states.shape)} on {hidden_states.device}"
        )
    values: list[Any] = [None if each is None else _plain(each) for each in inputs]
    return HeadInputs(*values)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that can be saved for the backward pass, without gradients."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _checked_top_k(
    log_probs: Any,
    indices: Any,
    student: HeadInputs,
    teacher: tuple[Any, ...],
    divergence: Divergence,
    entropy_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the teacher's likeliest classes without gradients."""
    check_plain_tensors(teacher_log_probs=log_probs, teacher_indices=indices)
    if any(each is not None for each in teacher):
        raise ValueError(
            "teacher_log_probs take the place of teacher_hidden and its head: got both"
        )
    if divergence.kind != "forward_kl" or divergence.ce_weight or entropy_out is not None:
        raise ValueError(
            "teacher_log_probs are for divergence='forward_kl', ce_weight=0 and entropy_out=None, "
            f"got {divergence.kind!r}, {divergence.ce_weight} and a {type(entropy_out).__name__}"
        )
    tokens, vocab_size = len(student.hidden_states), student.weight.shape[0]
    shape, device = tuple(log_probs.shape), student.hidden_states.device
    is_fitting = len(shape) == 2 and shape[0] == tokens and 0 < shape[1] <= vocab_size
    if not is_fitting or log_probs.device != device or not log_probs.is_floating_point():
        raise ValueError(
            f"teacher_log_probs must be floating-point of shape ({tokens}, K <= {vocab_size}) on "
            f"{device}, got {log_probs.dtype} of {shape} on {log_probs.device}"
        )
    if (indices.shape, indices.dtype, indices.device) != (log_probs.shape, torch.int64, device):
        raise ValueError(
            f"teacher_indices must be torch.int64 of shape {shape} on {device}, got "
            f"{indices.dtype} of {tuple(indices.shape)} on {indices.device}"
        )
    wrong = indices[(indices < 0) | (indices >= vocab_size)]  # the host reads how many
    if len(wrong):
        raise ValueError(
            f"teacher_indices must be in [0, {vocab_size}), got {wrong[0].item()} "
            f"({len(wrong)} outside)"
        )
    return _plain(log_probs), _plain(indices)


@contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Name the arguments of one head in errors as this operator does."""
    try:
        yield
    except ValueError as error:
        names = "weight" if prefix == "student_" else "weight|bias|softcap|logit_scale|low_rank"
        message = re.sub(r"\bhidden_states\b", f"{prefix}hidden", str(error))
        raise ValueError(re.sub(rf"\b({names})\b", rf"{prefix}\1", message)) from None
