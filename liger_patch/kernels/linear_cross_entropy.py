"""Cross entropy of ``hidden_states @ weight.T`` and its gradients, without the (N, V) logits.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary. The chunks are those of
``head/chunked``; gradients are computed in the forward pass, so forward and backward cost three
matrix products of 2 n H V operations, two with a frozen head, one without gradients.

The backward pass multiplies by the upstream gradient, and reads and writes nothing where that is 1.
The chunks are computed again, times the upstream gradient, where that is not one number
(reduction "none" with a trainable head), where float16 would lose small gradients before a loss
scale reaches them, and in a second backward pass over one graph. The gradient in the forward pass:
Liger-Kernel (arXiv:2410.10989).

In a graph it is an operator of ``torch.library``: what depends on values, as the number of
supervised tokens does, stays within, so that a graph serves every batch of its shapes. Gradients
that the forward pass computes are results of the operator, empty where there are none. The backward
pass scales copies of them: a graph may run backward twice.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, check_backward
from liger_patch.kernels.graphs import constants, is_traced, operator, runs_eagerly
from liger_patch.kernels.head.chunked import (
    ChunkConfig,
    check_arguments,
    loss_and_gradients,
    loss_factors,
    loss_gradients,
    prepare_chunks,
)
from liger_patch.kernels.head.gradients import scale_
from liger_patch.kernels.head.inputs import (
    HeadInputs,
    Surroundings,
    VocabShard,
    Wanted,
    product_dtype,
    save_inputs,
    saved_inputs,
)
from liger_patch.kernels.head.labels import traced_items
from liger_patch.kernels.options import LossOptions

_OPTIONS = ("ignore_index", "softcap", "logit_scale", "label_smoothing", "z_loss")
_TENSORS = (
    "Tensor hidden_states, Tensor weight, Tensor? bias, Tensor? low_rank, Tensor? low_rank_weight, "
    "Tensor labels, Tensor? class_weight, Tensor? token_weight, Tensor? num_items_in_batch"
)
_NUMBERS = (
    "int ignore_index, float? softcap, float logit_scale, float label_smoothing, float z_loss, "
    "float? chunk_mib, ScalarType? autocast, bool[] wanted, str reduction"
)
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in HeadInputs._fields)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        config: ChunkConfig,
        factors: Tensor,  # (N,) of each token's loss, in the order of the compacted labels
        reduction: str,
        *inputs: Any,
    ) -> Tensor:
        loss, ctx.gradients = loss_and_gradients(config, HeadInputs(*inputs), factors, reduction)
        ctx.config, ctx.factors, ctx.reduction = config, factors, reduction
        save_inputs(ctx, inputs, config.options)
        return loss

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("linear_cross_entropy", grad_output)
        config: ChunkConfig = ctx.config
        labels, per_token = config.labels, ctx.reduction == "none"
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            inputs, options = saved_inputs(ctx)
            config = replace(config, options=options)
            gradients = loss_gradients(config, inputs, ctx.factors, grad_output)
        elif per_token:
            labels.scale_rows_(gradients, labels.gather(grad_output))
        else:
            scale_([each for each in gradients if each is not None], grad_output)
        return None, None, None, *gradients


class _Arguments:
    """The arguments of the operator."""

    def __init__(self, tensors: Any, numbers: dict[str, Any]) -> None:
        *inputs, self.labels, class_weight, token_weight, items = tensors[:9]
        self.inputs = HeadInputs(*inputs)
        options = {name: numbers[name] for name in _OPTIONS}
        self.options = LossOptions(**options, class_weight=class_weight)
        self.chunk_mib, self.reduction = numbers["chunk_mib"], numbers["reduction"]
        self.surroundings = Surroundings(Wanted(*numbers["wanted"]), numbers["autocast"])
        self.how = {
            "reduction": self.reduction,
            "token_weight": token_weight,
            "num_items_in_batch": items,
        }

    @property
    def dtype(self) -> torch.dtype:
        return product_dtype(self.inputs, self.surroundings.autocast)

    @property
    def in_forward(self) -> bool:
        """Whether the gradients are results of the forward pass."""
        wanted = self.surroundings.wanted
        return wanted.in_forward(self.dtype, same_for_all=self.reduction != "none")

    def check(self) -> None:
        hidden_states, weight, bias, *low_rank = self.inputs
        pair: Any = None if low_rank[0] is None else tuple(low_rank)
        check_arguments(hidden_states, weight, self.labels, bias, pair, self.options, **self.how)

    def prepare(self) -> tuple[ChunkConfig, Tensor]:
        """Return the configuration of the chunks, and the factors of the tokens' losses."""
        self.check()
        how = self.options, self.chunk_mib, None, self.surroundings
        config = prepare_chunks(self.inputs, self.labels, *how)
        return config, loss_factors(config, self.labels, **self.how)

    def gradient_results(self, wanted: Wanted) -> list[Tensor]:
        """Return memory for the gradients of the inputs; (0,) where not wanted."""
        inputs: Any = self.inputs
        pairs = zip(inputs, wanted, strict=True)
        return self.as_results([each.new_empty(each.shape) if w else None for each, w in pairs])

    def as_results(self, gradients: list[Tensor | None] | None) -> list[Tensor]:
        """Return gradients as results of the operator: contiguous, (0,) for None."""
        empty = self.inputs.hidden_states.new_empty
        present = gradients or [None] * 5
        return [empty(0) if each is None else each.contiguous() for each in present]


def _results(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    given = _Arguments(tensors, numbers)
    given.check()
    shape = given.labels.shape if given.reduction == "none" else ()
    loss = given.labels.new_empty(shape, dtype=accumulation_dtype(given.dtype))
    wanted = given.surroundings.wanted if given.in_forward else Wanted()
    return loss, *given.gradient_results(wanted)


@operator(
    _results,
    schema=f"({_TENSORS}, *, {_NUMBERS}) -> (Tensor loss, {_GRADIENTS})",
    reads_values=True,
)
def _linear_cross_entropy(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    given = _Arguments(tensors, numbers)
    config, factors = given.prepare()
    loss, gradients = loss_and_gradients(config, given.inputs, factors, given.reduction)
    return loss, *given.as_results(gradients)


def _backward_results(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    given = _Arguments(tensors, numbers)
    return tuple(given.gradient_results(given.surroundings.wanted))


@operator(
    _backward_results,
    schema=f"({_TENSORS}, Tensor grad_output, *, {_NUMBERS}) -> ({_GRADIENTS})",
    reads_values=True,
)
def _linear_cross_entropy_backward(*tensors: Any, **numbers: Any) -> tuple[Tensor, ...]:
    given = _Arguments(tensors, numbers)
    config, factors = given.prepare()
    return tuple(given.as_results(loss_gradients(config, given.inputs, factors, tensors[-1])))


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers = keyword_only_inputs
    given = _Arguments(inputs, keyword_only_inputs)
    ctx.in_forward = given.in_forward
    if ctx.in_forward:
        # make_fx detaches a saved result: it would no longer depend on the inputs. This is another
        # tensor on its storage; a view would keep the result, whose node keeps the view: a cycle
        gradients = (torch.ops.aten._unsafe_view(each, each.shape) for each in output[1:])
        ctx.save_for_backward(given.labels, *gradients)
    else:
        ctx.save_for_backward(*inputs)


def _backward(
    ctx: Any, grad_output: Tensor | None, *of_gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    if any(each is not None for each in of_gradients):
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: its gradients are those of a recorded "
            "backward pass, which cannot be differentiated again. Run it under torch.no_grad()"
        )
    wanted, others = ctx.numbers["wanted"], [None] * 4  # labels and weights
    named = zip(HeadInputs._fields, ctx.needs_input_grad, wanted, strict=False)
    missing = [name for name, needs, is_wanted in named if needs and not is_wanted]
    if missing:
        raise RuntimeError(
            f"the loss was recorded without gradients of {', '.join(missing)}: record it with "
            "gradients enabled, and with requires_grad set of all that will be trained"
        )
    if grad_output is None:  # no gradient reaches the loss
        return (*[None] * 5, *others)
    check_backward("linear_cross_entropy", grad_output)
    if ctx.in_forward:
        labels, *gradients = ctx.saved_tensors
        factor = grad_output
        if ctx.numbers["reduction"] == "none":
            # 0 * inf of an ignored token would be nan
            is_ignored = labels == ctx.numbers["ignore_index"]
            factor = grad_output.masked_fill(is_ignored, 0.0)[:, None]
        gradients = [(each.to(factor.dtype) * factor).to(each.dtype) for each in gradients]
    else:
        arguments = *ctx.saved_tensors, grad_output
        gradients = _linear_cross_entropy_backward(*arguments, **ctx.numbers)
    pairs = zip(gradients, wanted, strict=True)
    return (*(each if is_wanted else None for each, is_wanted in pairs), *others)


torch.library.register_autograd("liger_patch::linear_cross_entropy", _backward, setup_context=_save)


def linear_cross_entropy(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # (V,)
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    chunk_mib: float | None = None,
    vocab_shard: VocabShard | None = None,
    hopper_kernels: bool | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(hidden_states, weight, bias), labels)`` without (N, V) logits.

    Within ``torch.compile``, ``torch.export``, ``make_fx``, ``FakeTensorMode`` and selective
    checkpointing it is the operator ``liger_patch::linear_cross_entropy``. A ``vocab_shard`` and
    ``hopper_kernels`` break the graph of ``torch.compile``, and are errors in ``torch.export``,
    ``make_fx`` and ``FakeTensorMode``.

    Named after ``torch.nn.functional.linear_cross_entropy``, and equal to it but for the mean of no
    tokens (see Returns). Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the softmax is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype.

    Args:
        hidden_states: (N, H).
        weight: (V, H), on the same device.
        labels: (N,) integers in [0, V), or ``ignore_index`` where a token is not supervised.
        bias: (V,), added to the logits.
        low_rank: (N, R) and (V, R), whose product is added to the logits: an adapter (LoRA) on the
            head. Of any floating dtype; the product is computed in that of the others.
        reduction: "mean", "sum" or "none".
        softcap: logits become ``softcap * tanh(logits / softcap)``, after ``logit_scale``.
        logit_scale: factor on the logits.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss.
        class_weight: (V,), ``weight`` of ``torch.nn.functional.cross_entropy``.
        token_weight: (N,) factor on each token's loss; the mean is then the weighted mean.
        num_items_in_batch: denominator of the mean instead of the (weighted) number of supervised
            tokens; 0 counts as 1.
        chunk_mib: MiB of logits held at once, > 0; at least one token's row. By default 512, or
            256 where the weight needs no gradient. Where a 16-bit gradient of the weight would be
            summed over more than 16 chunks, more logits are held, or the sum is kept in float32,
            whichever takes less memory.
        vocab_shard: of a vocabulary that is distributed over ranks (tensor parallel): weight, bias
            and ``low_rank[1]`` are this rank's rows (V_r, ...), everything else is for the whole
            vocabulary and the same on every rank, as are the results. The gradients of
            ``hidden_states`` and ``low_rank[0]`` are summed over the ranks.
        hopper_kernels: True to run the kernels for large batches, whatever the number of tokens:
            Hopper's own, or other GPUs' where these do not serve. False runs on Hopper what other
            GPUs run. None: as True for more than 512 tokens. Of no effect with ``vocab_shard``.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 inputs. It
        differs from PyTorch's as that of ``cross_entropy`` does: 0 where PyTorch's mean is nan.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if not (hopper_kernels is None or isinstance(hopper_kernels, bool)):
        raise ValueError(f"hopper_kernels must be True, False or None, got {hopper_kernels!r}")
    options = ignore_index, softcap, logit_scale, label_smoothing, z_loss
    if is_traced() and vocab_shard is None and hopper_kernels is None:
        inputs = HeadInputs(hidden_states, weight, bias, *(low_rank or (None, None)))
        wanted, autocast = Surroundings.by(inputs)
        numbers: dict[str, Any] = dict(zip(_OPTIONS, constants(*options), strict=True))
        numbers |= {"chunk_mib": chunk_mib, "autocast": autocast, "wanted": [*wanted]}
        items = traced_items(num_items_in_batch)
        tensors = *inputs, labels, class_weight, token_weight, items
        return _linear_cross_entropy(*tensors, reduction=reduction, **numbers)[0]
    given = hidden_states, weight, labels, bias, low_rank, LossOptions(*options, class_weight)
    how: dict[str, Any] = {
        "reduction": reduction,
        "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }
    return _call(given, how, chunk_mib, vocab_shard, hopper_kernels)


@runs_eagerly
def _call(
    given: tuple[Any, ...],
    how: dict[str, Any],
    chunk_mib: float | None,
    shard: VocabShard | None,
    hopper_kernels: bool | None,
) -> Tensor:
    inputs = check_arguments(*given, shard=shard, **how)
    _, _, labels, _, _, options = given
    prepared = inputs, labels, options, chunk_mib, shard
    config = prepare_chunks(*prepared, hopper_kernels=hopper_kernels)
    factors = loss_factors(config, labels, **how)
    return _LinearCrossEntropy.apply(config, factors, how["reduction"], *inputs)
