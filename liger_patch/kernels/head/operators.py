"""The operators on a head as ``torch.library`` has them: ``liger_patch::linear_cross_entropy`` and
``liger_patch::linear_log_probs``, for calls that become a part of a graph.

Results that depend on values (the number of supervised tokens, whether upstream gradients are
equal) stay within an operator, so that a graph serves every batch of its shapes. Gradients that the
forward pass computes are results of the operator; without a gradient, a result is empty. The
backward pass scales copies of them: a graph may run backward twice.
"""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, check_backward
from liger_patch.kernels.graphs import constants, operator
from liger_patch.kernels.head.chunked import ChunkConfig, check_arguments, prepare_chunks
from liger_patch.kernels.head.inputs import HeadInputs, Surroundings, Wanted, product_dtype
from liger_patch.kernels.head.labels import traced_items
from liger_patch.kernels.head.losses import (
    LogProbs,
    expected_upstream,
    log_probs_and_gradients,
    log_probs_gradients_,
    loss_and_gradients,
    loss_factors,
    loss_gradients,
)
from liger_patch.kernels.head.row_sums import UpstreamGradients
from liger_patch.kernels.options import LossOptions

_TENSORS = (
    "Tensor hidden_states, Tensor weight, Tensor? bias, Tensor? low_rank, Tensor? low_rank_weight, "
    "Tensor labels, Tensor? class_weight"
)
_NUMBERS = (
    "int ignore_index, float? softcap, float logit_scale, float label_smoothing, float z_loss, "
    "float? chunk_mib, ScalarType? autocast, bool[] wanted"
)
_LOSS_OPTIONS = ("reduction", "token_weight", "num_items_in_batch")
_OPTIONS = ("ignore_index", "softcap", "logit_scale", "label_smoothing", "z_loss")
_LOSS_TENSORS = f"{_TENSORS}, Tensor? token_weight, Tensor? num_items_in_batch"
_LOG_PROBS_TENSORS = f"{_TENSORS}, Tensor? row_weights"
_LOG_PROBS = "str[] outputs, bool same_gradient"
_UPSTREAM = "Tensor? dlog_probs, Tensor? dentropy, Tensor? dlse, Tensor[] gradients"
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in HeadInputs._fields)
_FIELDS = ", ".join(f"Tensor {name}" for name in LogProbs._fields)


class _Head:
    """The arguments of an operator; ``how``: those that only one of the two has."""

    def __init__(self, tensors: Any, numbers: dict[str, Any]) -> None:
        *inputs, self.labels, class_weight = tensors[:7]
        self.inputs = HeadInputs(*inputs)
        self.options = LossOptions(
            **{name: numbers[name] for name in _OPTIONS}, class_weight=class_weight
        )
        self.chunk_mib = numbers["chunk_mib"]
        self.surroundings = Surroundings(Wanted(*numbers["wanted"]), numbers["autocast"])
        self.how: dict[str, Any] = {"row_weights": tensors[7]}
        if "reduction" in numbers:
            values = numbers["reduction"], *tensors[7:9]
            self.how = dict(zip(_LOSS_OPTIONS, values, strict=True))
        self.same_for_all = numbers.get("same_gradient", numbers.get("reduction") != "none")

    @property
    def dtype(self) -> torch.dtype:
        return product_dtype(self.inputs, self.surroundings.autocast)

    @property
    def in_forward(self) -> bool:
        """Whether the gradients are results of the forward pass."""
        return self.surroundings.wanted.in_forward(self.dtype, same_for_all=self.same_for_all)

    def check(self) -> None:
        hidden_states, weight, bias, *low_rank = self.inputs
        pair: Any = None if low_rank[0] is None else tuple(low_rank)
        check_arguments(hidden_states, weight, self.labels, bias, pair, self.options, **self.how)

    def prepare(self) -> ChunkConfig:
        self.check()
        return prepare_chunks(
            self.inputs, self.labels, self.options, self.chunk_mib, surroundings=self.surroundings
        )

    def gradient_results(self, *, computed: bool = True) -> list[Tensor]:
        """Return what holds the gradients by the inputs, without values: empty where not wanted."""
        inputs: Any = self.inputs
        pairs = zip(inputs, self.surroundings.wanted if computed else Wanted(), strict=True)
        return self.as_results([each.new_empty(each.shape) if w else None for each, w in pairs])

    def as_results(self, gradients: list[Tensor | None] | None) -> list[Tensor]:
        """Return gradients as the operators do."""
        empty = self.inputs.hidden_states.new_empty
        present = gradients or [None] * 5
        return [empty(0) if each is None else each.contiguous() for each in present]


def _arguments(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    labels: Tensor,
    options: dict[str, Any],
    chunk_mib: float | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the tensors and the numbers that all operators take, of a call now."""
    head = HeadInputs(hidden_states, weight, bias, *(low_rank or (None, None)))
    wanted, autocast = Surroundings.by(head)
    numbers = dict(zip(options, constants(*options.values()), strict=True))
    tensors = *head, labels, numbers.pop("class_weight")
    return tensors, {**numbers, "chunk_mib": chunk_mib, "autocast": autocast, "wanted": [*wanted]}


def _loss_results(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    head = _Head(tensors, numbers)
    head.check()
    shape = head.labels.shape if numbers["reduction"] == "none" else ()
    loss = head.labels.new_empty(shape, dtype=accumulation_dtype(head.dtype))
    return loss, *head.gradient_results(computed=head.in_forward)


@operator(
    _loss_results,
    schema=f"({_LOSS_TENSORS}, *, {_NUMBERS}, str reduction) -> (Tensor loss, {_GRADIENTS})",
    reads_values=True,
)
def _linear_cross_entropy(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    head = _Head(tensors, numbers)
    config = head.prepare()
    factors = loss_factors(config, head.labels, **head.how)
    loss, gradients = loss_and_gradients(config, head.inputs, factors, numbers["reduction"])
    return loss, *head.as_results(gradients)


def _backward_results(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    return tuple(_Head(tensors, numbers).gradient_results())


@operator(
    _backward_results,
    schema=f"({_LOSS_TENSORS}, Tensor grad_output, *, {_NUMBERS}, str reduction) -> ({_GRADIENTS})",
    reads_values=True,
)
def _linear_cross_entropy_backward(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    head = _Head(tensors, numbers)
    config = head.prepare()
    factors = loss_factors(config, head.labels, **head.how)
    return tuple(head.as_results(loss_gradients(config, head.inputs, factors, tensors[-1])))


def _save_loss(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers, head = keyword_only_inputs, _Head(inputs, keyword_only_inputs)
    ctx.in_forward = head.in_forward
    if ctx.in_forward:
        # make_fx detaches a saved result: it would no longer depend on the inputs. This is another
        # tensor on its storage; a view would keep the result, whose node keeps the view: a cycle
        gradients = (torch.ops.aten._unsafe_view(each, each.shape) for each in output[1:])
        ctx.save_for_backward(head.labels, *gradients)
    else:
        ctx.save_for_backward(*inputs)


def _loss_gradients(
    ctx: Any, grad_output: Tensor | None, *of_gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    if any(each is not None for each in of_gradients):
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: its gradients are those of a recorded "
            "backward pass, which cannot be differentiated again. Run it under torch.no_grad()"
        )
    if grad_output is None:  # no gradient reaches the loss
        return _by_inputs(ctx, [None] * 5, 4)
    check_backward("linear_cross_entropy", grad_output)
    if not ctx.in_forward:
        arguments = *ctx.saved_tensors, grad_output
        return _by_inputs(ctx, _linear_cross_entropy_backward(*arguments, **ctx.numbers), 4)
    labels, *gradients = ctx.saved_tensors
    factor = grad_output
    if ctx.numbers["reduction"] == "none":
        # 0 * inf of an ignored token would be nan
        is_ignored = labels == ctx.numbers["ignore_index"]
        factor = grad_output.masked_fill(is_ignored, 0.0)[:, None]
    gradients = [
        (each.to(factor.dtype) * factor).to(each.dtype) if wanted else each
        for each, wanted in zip(gradients, ctx.numbers["wanted"], strict=True)
    ]
    return _by_inputs(ctx, gradients, 4)


def _log_probs_results(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    head = _Head(tensors, numbers)
    head.check()
    fields = _fields(head, [name in numbers["outputs"] for name in LogProbs._fields])
    return *fields, *head.gradient_results(computed=head.in_forward)


def _fields(head: _Head, given: list[Any]) -> list[Tensor]:
    """Return the fields of ``LogProbs`` as the operator does: what is given, or without values
    where it is True; empty where there is none.
    """
    wide = accumulation_dtype(head.dtype)
    return [
        each
        if isinstance(each, Tensor)
        else head.labels.new_empty(
            head.labels.shape if each else 0, dtype=torch.bool if name == "is_top1" else wide
        )
        for name, each in zip(LogProbs._fields, given, strict=True)
    ]


@operator(
    _log_probs_results,
    schema=f"({_LOG_PROBS_TENSORS}, *, {_NUMBERS}, {_LOG_PROBS}) -> ({_FIELDS}, {_GRADIENTS})",
    reads_values=True,
)
def _linear_log_probs(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    head = _Head(tensors, numbers)
    config, how = head.prepare(), {"same_gradient": head.same_for_all}
    expected = expected_upstream(config, tensors[7])
    results, gradients = log_probs_and_gradients(
        config, head.inputs, numbers["outputs"], expected, **how
    )
    return *_fields(head, results), *head.as_results(gradients)


@operator(
    _backward_results,
    schema=f"({_LOG_PROBS_TENSORS}, {_UPSTREAM}, *, {_NUMBERS}, {_LOG_PROBS}) -> ({_GRADIENTS})",
    reads_values=True,
)
def _linear_log_probs_backward(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    head, (*upstream, gradients) = _Head(tensors, numbers), tensors[8:]
    pairs = zip(gradients, numbers["wanted"], strict=False)
    copies = [each.clone() if wanted else None for each, wanted in pairs]
    config = head.prepare()
    expected = expected_upstream(config, tensors[7])
    result = log_probs_gradients_(
        config, lambda: head.inputs, expected, copies or None, UpstreamGradients(*upstream)
    )
    return tuple(head.as_results(result))


def _save_log_probs(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2], *output[4:])
    ctx.numbers, head = keyword_only_inputs, _Head(inputs, keyword_only_inputs)
    ctx.save_for_backward(*inputs, *(output[6:] if head.in_forward else ()))


def _log_probs_gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    check_backward("linear_log_probs", *upstream)
    dlog_probs, dentropy, _, dlse, *_ = upstream
    saved = ctx.saved_tensors  # once: checkpoints give them a single time
    arguments = *saved[:8], dlog_probs, dentropy, dlse, list(saved[8:])
    return _by_inputs(ctx, _linear_log_probs_backward(*arguments, **ctx.numbers), 3)


def _by_inputs(ctx: Any, gradients: Any, others: int) -> tuple[Tensor | None, ...]:
    """Return the gradients by all tensors of an operator: ``others`` have none.

    Raises:
        RuntimeError: a graph that was recorded without a gradient is to compute it.
    """
    named = zip(HeadInputs._fields, ctx.needs_input_grad, ctx.numbers["wanted"], strict=False)
    missing = [name for name, needs, wanted in named if needs and not wanted]
    if missing:
        raise RuntimeError(
            f"the loss was recorded without gradients of {', '.join(missing)}: record it with "
            "gradients enabled, and with requires_grad set of all that will be trained"
        )
    pairs = zip(gradients, ctx.numbers["wanted"], strict=True)
    return (*(each if wanted else None for each, wanted in pairs), *[None] * others)


torch.library.register_autograd(
    "liger_patch::linear_cross_entropy", _loss_gradients, setup_context=_save_loss
)
torch.library.register_autograd(
    "liger_patch::linear_log_probs", _log_probs_gradients, setup_context=_save_log_probs
)


def linear_cross_entropy(
    *inputs: Any, reduction: str, token_weight: Any, num_items_in_batch: Any, **how: Any
) -> Tensor:
    """Call the operator; arguments of ``_arguments``."""
    tensors, numbers = _arguments(*inputs, **how)
    others = token_weight, traced_items(num_items_in_batch)
    return _linear_cross_entropy(*tensors, *others, reduction=reduction, **numbers)[0]


def linear_log_probs(
    *inputs: Any, outputs: list[str], same_gradient: bool, row_weights: Tensor | None, **how: Any
) -> LogProbs:
    """Call the operator; arguments of ``_arguments``."""
    tensors, numbers = _arguments(*inputs, **how)
    numbers |= {"outputs": outputs, "same_gradient": same_gradient}
    results = _linear_log_probs(*tensors, row_weights, **numbers)
    fields: Any = [
        result if name in outputs else None
        for name, result in zip(LogProbs._fields, results[:6], strict=True)
    ]
    return LogProbs(*fields)
