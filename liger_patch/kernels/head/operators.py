"""The operators on a head as ``torch.library`` has them: ``liger_patch::linear_cross_entropy`` and
``liger_patch::linear_log_probs``, for calls that become a part of a graph.

Results that depend on values (the number of supervised tokens, whether upstream gradients are
equal) stay within an operator, so that a graph serves every batch of its shapes. Gradients that the
forward pass computes are results of the operator; without a gradient, a result is empty. The
backward pass scales copies of them: a graph may run backward twice.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, autocast_dtype, check_backward
from liger_patch.kernels.graphs import constants, define, refuse_second_derivative
from liger_patch.kernels.head.chunked import ChunkConfig, check_arguments, prepare_chunks
from liger_patch.kernels.head.inputs import HeadInputs, Surroundings, Wanted, product_dtype
from liger_patch.kernels.head.labels import traced_items
from liger_patch.kernels.head.log_probs import (
    LogProbs,
    log_probs_and_gradients,
    log_probs_gradients_,
)
from liger_patch.kernels.head.losses import loss_and_gradients, loss_factors, loss_gradients
from liger_patch.kernels.head.statistics import UpstreamGradients
from liger_patch.kernels.options import LossOptions

_HEAD = (
    "Tensor hidden_states, Tensor weight, Tensor? bias, Tensor? low_rank, Tensor? low_rank_weight, "
    "Tensor labels, Tensor? class_weight, int ignore_index, float? softcap, float logit_scale, "
    "float label_smoothing, float z_loss, float? chunk_mib, ScalarType? autocast, bool[] wanted"
)
_LOSS = f"{_HEAD}, str reduction, Tensor? token_weight, Tensor? num_items_in_batch"
_LOG_PROBS = f"{_HEAD}, str[] outputs, bool same_gradient"
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in HeadInputs._fields)


class _Head(NamedTuple):
    """The arguments that both operators begin with."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    low_rank: Tensor | None
    low_rank_weight: Tensor | None
    labels: Tensor
    class_weight: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    label_smoothing: float
    z_loss: float
    chunk_mib: float | None
    autocast: torch.dtype | None
    wanted: list[bool]

    @classmethod
    def split(cls, arguments: Any) -> tuple["_Head", Any]:
        """Return them, and the arguments behind them."""
        count = len(cls._fields)
        return cls(*arguments[:count]), arguments[count:]

    @classmethod
    def of_call(
        cls,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank: tuple[Tensor, Tensor] | None,
        labels: Tensor,
        options: dict[str, Any],
        chunk_mib: float | None,
    ) -> "_Head":
        """Return them for a call now; options of ``LossOptions``."""
        states, low_rank_weight = low_rank or (None, None)
        tensors = hidden_states, weight, bias, states, low_rank_weight
        enabled = torch.is_grad_enabled()
        return cls(
            *tensors,
            labels,
            chunk_mib=chunk_mib,
            autocast=autocast_dtype(hidden_states.device.type),
            wanted=[enabled and each is not None and each.requires_grad for each in tensors],
            **dict(zip(options, constants(*options.values()), strict=True)),
        )

    @property
    def options(self) -> LossOptions:
        return LossOptions(
            self.ignore_index,
            self.softcap,
            self.logit_scale,
            self.label_smoothing,
            self.z_loss,
            self.class_weight,
        )

    def check(self, **how: Any) -> HeadInputs:
        low_rank: Any = (self.low_rank, self.low_rank_weight)
        return check_arguments(
            self.hidden_states,
            self.weight,
            self.labels,
            self.bias,
            None if self.low_rank is None else low_rank,
            self.options,
            **how,
        )

    def prepare(self, **how: Any) -> tuple[ChunkConfig, HeadInputs]:
        inputs = self.check(**how)
        surroundings = Surroundings(Wanted(*self.wanted), self.autocast)
        config = prepare_chunks(
            inputs, self.labels, self.options, self.chunk_mib, surroundings=surroundings
        )
        return config, inputs

    def in_forward(self, *, same_for_all: bool) -> bool:
        """Return whether the gradients are results of the forward pass."""
        dtype = product_dtype(HeadInputs(*self[:5]), self.autocast)
        return Wanted(*self.wanted).in_forward(dtype, same_for_all=same_for_all)

    def gradient_results(self, *, computed: bool = True) -> list[Tensor]:
        """Return what holds the gradients by the inputs, without values: empty where not wanted."""
        return [
            torch.empty_like(each, memory_format=torch.contiguous_format)
            if computed and wanted and each is not None
            else self.hidden_states.new_empty(0)
            for each, wanted in zip(self[:5], self.wanted, strict=True)
        ]

    def as_results(self, gradients: list[Tensor | None] | None) -> list[Tensor]:
        """Return gradients as the operators do."""
        empty = self.hidden_states.new_empty
        present = gradients or [None] * 5
        return [empty(0) if each is None else each.contiguous() for each in present]


def _loss_results(*arguments: Any) -> tuple[Tensor, ...]:
    head, (reduction, token_weight, num_items_in_batch) = _Head.split(arguments)
    inputs = head.check(
        reduction=reduction, token_weight=token_weight, num_items_in_batch=num_items_in_batch
    )
    dtype = accumulation_dtype(product_dtype(inputs, head.autocast))
    shape = head.labels.shape if reduction == "none" else ()
    computed = head.in_forward(same_for_all=reduction != "none")
    loss = head.hidden_states.new_empty(shape, dtype=dtype)
    return loss, *head.gradient_results(computed=computed)


def _loss(*arguments: Any) -> tuple[Tensor, ...]:
    head, config, inputs, factors, reduction = _prepared_loss(arguments)
    loss, gradients = loss_and_gradients(config, inputs, factors, reduction)
    return loss, *head.as_results(gradients)


def _loss_backward_results(grad_output: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(_Head.split(arguments)[0].gradient_results())


def _loss_backward(grad_output: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    head, config, inputs, factors, _ = _prepared_loss(arguments)
    return tuple(head.as_results(loss_gradients(config, inputs, factors, grad_output)))


def _prepared_loss(arguments: Any) -> tuple[_Head, ChunkConfig, HeadInputs, Tensor, str]:
    head, (reduction, token_weight, num_items_in_batch) = _Head.split(arguments)
    how = {
        "reduction": reduction,
        "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }
    config, inputs = head.prepare(**how)
    return head, config, inputs, loss_factors(config, head.labels, **how), reduction


def _save_loss(ctx: Any, inputs: Any, output: Any) -> None:
    head, (reduction, *_) = _Head.split(inputs)
    ctx.set_materialize_grads(False)
    ctx.in_forward = head.in_forward(same_for_all=reduction != "none")
    ctx.reduction, ctx.ignore_index, ctx.wanted = reduction, head.ignore_index, head.wanted
    if ctx.in_forward:
        # make_fx detaches a saved result: it would no longer depend on the inputs. This is another
        # tensor on its storage; a view would keep the result, whose node keeps the view: a cycle
        gradients = (torch.ops.aten._unsafe_view(each, each.shape) for each in output[1:])
        ctx.save_for_backward(head.labels, *gradients)
    else:
        _save(ctx, inputs)


def _loss_gradients(
    ctx: Any, grad_output: Tensor | None, *of_gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    if any(each is not None for each in of_gradients):
        refuse_second_derivative("linear_cross_entropy")
    if grad_output is None:  # no gradient reaches the loss
        return _by_inputs(ctx, [None] * 5, 13)
    check_backward("linear_cross_entropy", grad_output)
    if not ctx.in_forward:
        operator = torch.ops.liger_patch.linear_cross_entropy_backward
        gradients = operator(grad_output, *_saved(ctx)[0])
    else:
        labels, *gradients = ctx.saved_tensors
        factor = grad_output
        if ctx.reduction == "none":
            # 0 * inf of an ignored token would be nan
            factor = grad_output.masked_fill(labels == ctx.ignore_index, 0.0)[:, None]
        gradients = [
            (each.to(factor.dtype) * factor).to(each.dtype) if wanted else each
            for each, wanted in zip(gradients, ctx.wanted, strict=True)
        ]
    return _by_inputs(ctx, gradients, 13)


def _log_probs_results(*arguments: Any) -> tuple[Tensor, ...]:
    head, (outputs, same_gradient) = _Head.split(arguments)
    inputs = head.check()
    dtype = accumulation_dtype(product_dtype(inputs, head.autocast))
    results = [
        head.labels.new_empty(
            head.labels.shape if name in outputs else 0,
            dtype=torch.bool if name == "is_top1" else dtype,
        )
        for name in LogProbs._fields
    ]
    computed = head.in_forward(same_for_all=same_gradient)
    return (*results, *head.gradient_results(computed=computed))


def _log_probs(*arguments: Any) -> tuple[Tensor, ...]:
    head, (outputs, same_gradient) = _Head.split(arguments)
    config, inputs = head.prepare()
    results, gradients = log_probs_and_gradients(
        config, inputs, outputs, same_gradient=same_gradient
    )
    dtype = accumulation_dtype(config.dtype)
    filled = [
        head.labels.new_empty(0, dtype=torch.bool if name == "is_top1" else dtype)
        if result is None
        else result
        for name, result in zip(LogProbs._fields, results, strict=True)
    ]
    return (*filled, *head.as_results(gradients))


def _log_probs_backward_results(
    dlog_probs: Any, dentropy: Any, dlse: Any, gradients: Any, *arguments: Any
) -> tuple[Tensor, ...]:
    return tuple(_Head.split(arguments)[0].gradient_results())


def _log_probs_backward(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    gradients: list[Tensor],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    head, _ = _Head.split(arguments)
    config, inputs = head.prepare()
    copies = [
        each.clone() if wanted else None
        for each, wanted in zip(gradients, head.wanted, strict=False)
    ]
    upstream = UpstreamGradients(dlog_probs, dentropy, dlse)
    result = log_probs_gradients_(config, lambda: inputs, copies or None, upstream)
    return tuple(head.as_results(result))


def _save_log_probs(ctx: Any, inputs: Any, output: Any) -> None:
    head, (_, same_gradient) = _Head.split(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2], *output[4:])
    ctx.wanted = head.wanted
    results = output[6:] if head.in_forward(same_for_all=same_gradient) else ()
    _save(ctx, inputs, *results)


def _log_probs_gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    check_backward("linear_log_probs", *upstream)
    dlog_probs, dentropy, _, dlse, *_ = upstream
    arguments, gradients = _saved(ctx)
    operator = torch.ops.liger_patch.linear_log_probs_backward
    return _by_inputs(ctx, operator(dlog_probs, dentropy, dlse, gradients, *arguments), 12)


def _save(ctx: Any, arguments: Any, *others: Tensor) -> None:
    """Save the arguments of an operator, and other tensors behind them."""
    ctx.others = [None if isinstance(each, Tensor) else each for each in arguments]
    tensors = (each if isinstance(each, Tensor) else None for each in arguments)
    ctx.save_for_backward(*tensors, *others)


def _saved(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """Return what ``_save`` was given."""
    saved = ctx.saved_tensors  # once: checkpoints give them a single time
    pairs = zip(saved, ctx.others, strict=False)
    arguments = [other if tensor is None else tensor for tensor, other in pairs]
    return arguments, list(saved[len(arguments) :])


def _by_inputs(ctx: Any, gradients: Any, others: int) -> tuple[Tensor | None, ...]:
    """Return the gradients by all arguments of an operator: ``others`` have none.

    Raises:
        RuntimeError: a graph that was recorded without a gradient is to compute it.
    """
    needed = zip(HeadInputs._fields, ctx.needs_input_grad, ctx.wanted, strict=False)
    missing = [name for name, needs, wanted in needed if needs and not wanted]
    if missing:
        raise RuntimeError(
            f"the loss was recorded without gradients of {', '.join(missing)}: record it with "
            "gradients enabled, and with requires_grad set of all that will be trained"
        )
    pairs = zip(gradients, ctx.wanted, strict=True)
    return (*(each if wanted else None for each, wanted in pairs), *[None] * others)


_RESULTS = f"(Tensor loss, {_GRADIENTS})"
_FIELDS = ", ".join(f"Tensor {name}" for name in LogProbs._fields)
if define(
    "linear_cross_entropy",
    f"({_LOSS}) -> {_RESULTS}",
    _loss,
    _loss_results,
    reads_values=True,
):
    define(
        "linear_cross_entropy_backward",
        f"(Tensor grad_output, {_LOSS}) -> ({_GRADIENTS})",
        _loss_backward,
        _loss_backward_results,
        reads_values=True,
        is_backward=True,
    )
    define(
        "linear_log_probs",
        f"({_LOG_PROBS}) -> ({_FIELDS}, {_GRADIENTS})",
        _log_probs,
        _log_probs_results,
        reads_values=True,
    )
    define(
        "linear_log_probs_backward",
        "(Tensor? dlog_probs, Tensor? dentropy, Tensor? dlse, Tensor[] gradients, "
        f"{_LOG_PROBS}) -> ({_GRADIENTS})",
        _log_probs_backward,
        _log_probs_backward_results,
        reads_values=True,
        is_backward=True,
    )
    torch.library.register_autograd(
        "liger_patch::linear_cross_entropy", _loss_gradients, setup_context=_save_loss
    )
    torch.library.register_autograd(
        "liger_patch::linear_log_probs", _log_probs_gradients, setup_context=_save_log_probs
    )


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    labels: Tensor,
    *,
    options: dict[str, Any],
    chunk_mib: float | None,
    reduction: str,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | float | None,
) -> Tensor:
    """Call the operator."""
    head = _Head.of_call(hidden_states, weight, bias, low_rank, labels, options, chunk_mib)
    operator = torch.ops.liger_patch.linear_cross_entropy
    return operator(*head, reduction, token_weight, traced_items(num_items_in_batch))[0]


def linear_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    labels: Tensor,
    *,
    options: dict[str, Any],
    chunk_mib: float | None,
    outputs: list[str],
    same_gradient: bool,
) -> LogProbs:
    """Call the operator."""
    head = _Head.of_call(hidden_states, weight, bias, low_rank, labels, options, chunk_mib)
    results = torch.ops.liger_patch.linear_log_probs(*head, outputs, same_gradient)
    named = zip(LogProbs._fields, results[:6], strict=True)
    fields: Any = (result if name in outputs else None for name, result in named)
    return LogProbs(*fields)
