"""Cross entropy of ``hidden_states @ weight.T`` and its gradients, without the (N, V) logits.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary, C: tokens in a chunk. Ignored tokens
are dropped. For each chunk, where gradients are wanted in the forward pass:

    logits = X_c W^T                 one matrix product into a buffer that every chunk reuses
    logits -> losses, G in place     G = dloss/dlogits; see ``heads`` for how
    dX_c = G W,  dW += G^T X_c       two products; the first chunk writes dW, later ones add to it

so forward and backward cost three matrix products of 2 n H V operations, two with a frozen head,
one without gradients. A low-rank adapter on the head adds its own thin products to each of them; a
quantised weight is dequantised a slice of classes at a time, for each product. Extra memory: the
gradients themselves and C * V logits. Rounding a 16-bit dW after each of many chunks would lose
accuracy: see ``summed_chunk_bounds``.

The backward pass multiplies by the upstream gradient, and reads and writes nothing where that is 1.
The chunks are computed again, with the upstream gradient in place, where it is not one number
(reduction "none" with a trainable head), where float16 would lose small gradients before a loss
scale reaches them, and in a second backward pass over one graph. Chunking and the gradient in the
forward pass: Liger-Kernel (arXiv:2410.10989).
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.chunks import (
    MIB,
    chunk_bounds,
    chunks_of,
    default_chunk_mib,
    rows_before_count,
    summed_chunk_bounds,
)
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.cross_entropy_pytorch import accumulation_dtype
from liger_patch.kernels.differentiation import refuse_second_derivative
from liger_patch.kernels.gradients import Gradients
from liger_patch.kernels.head_inputs import HeadInputs, QuantizedWeight, Wanted
from liger_patch.kernels.heads import prepare_head
from liger_patch.kernels.loss_options import LossOptions
from liger_patch.kernels.scale import scale_
from liger_patch.kernels.supervised import (
    Supervised,
    Tokens,
    check_tokens,
    order_tokens,
    refuse_others_than_tensors,
    token_factors,
)

MAX_CHUNK_MIB = 2**40  # no device has so much
ALIGNED_V = 64  # elements: rows of logits start at 128-byte boundaries, whatever V


@dataclass(frozen=True)
class _Problem:
    """All that one call knows beside its inputs."""

    tokens: Tokens
    factors: Tensor  # (N,) of each token's loss in the result, in the order of the tokens
    options: LossOptions
    reduction: str
    dtype: torch.dtype  # of the matrix products and the logits
    chunk_bytes: int
    wanted: Wanted

    @property
    def gradients_in_forward(self) -> bool:
        """Whether gradients can be computed now and scaled when the upstream one is known."""
        if not any(self.wanted) or self.dtype == torch.float16:
            return False
        sums = self.wanted.weight or self.wanted.bias or self.wanted.low_rank_weight
        return self.reduction != "none" or not sums

    def rows_before_count(self, weight: Tensor | QuantizedWeight) -> int:
        """Of the first chunk, where it runs before the number of supervised tokens is read."""
        return rows_before_count(len(self.tokens.labels), self._row_bytes(weight), self.chunk_bytes)

    def bounds(
        self, n: int, weight: Tensor | QuantizedWeight, wanted: Wanted, *, first: int
    ) -> tuple[list[tuple[int, int]], torch.dtype]:
        """(start, stop) of each chunk of n tokens, and the dtype that dweight is summed in.

        ``first``: the rows of a first chunk that does not wait for n; the others are like it.
        """
        if first:
            return chunks_of(first, n), weight.dtype
        row_bytes = self._row_bytes(weight)
        wide = accumulation_dtype(self.dtype)
        if (
            not (wanted.weight and isinstance(weight, Tensor))
            or weight.dtype.itemsize >= wide.itemsize
        ):
            return chunk_bounds(n, row_bytes, self.chunk_bytes), weight.dtype
        wide_bytes = weight.numel() * wide.itemsize
        bounds, widen = summed_chunk_bounds(n, row_bytes, self.chunk_bytes, wide_bytes)
        return bounds, wide if widen else weight.dtype

    def _row_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        return _row_elements(weight) * self.dtype.itemsize


def _row_elements(weight: Tensor | QuantizedWeight) -> int:
    """Elements from one row of logits to the next."""
    return -(-weight.shape[0] // ALIGNED_V) * ALIGNED_V


def _run_chunks(
    problem: _Problem,
    inputs: HeadInputs,
    row_scale: Tensor,  # (N,) in the order of the tokens; (n,) where they are counted
    wanted: Wanted,
    supervised: Supervised | None = None,
) -> tuple[Tensor, Supervised, list[Tensor | None]]:
    """Losses (n,), the supervised tokens, and the gradients of the sum of ``row_scale * losses``.

    Where the head counts on the device, the first chunk is launched before the count is
    read: until the host knows it, the device has work.
    """
    factors = inputs.to(problem.dtype)
    weight, vocab_size = inputs.weight, inputs.weight.shape[0]
    head = prepare_head(factors, problem.tokens, problem.options)
    takes_memory = any(wanted) or not head.counts_on_device
    scale = row_scale if any(wanted) else None

    def logits_memory(tokens: int) -> Tensor | None:
        if not takes_memory:
            return None
        return factors.hidden_states.new_empty(tokens, _row_elements(weight))[:, :vocab_size]

    memory = early = None
    # in a second backward pass too, where n is known: the same chunks give the same bits
    first = problem.rows_before_count(weight) if head.counts_on_device else 0
    if supervised is None and first:
        memory = logits_memory(first)
        early = factors.of(problem.tokens.rows[:first])
        head.run(early, 0, memory=memory, row_scale=scale)
    if supervised is None:
        supervised = problem.tokens.read()
    n, rows = len(supervised.labels), supervised.rows
    bounds, sum_dtype = problem.bounds(n, weight, wanted, first=first)
    if memory is None and bounds:
        memory = logits_memory(bounds[0][1])
    odds = None if head.odds is None else head.odds.of(slice(n))
    gradients = Gradients(inputs, factors, rows, wanted, sum_dtype, odds)
    for start, stop in bounds:
        chunk = slice(start, stop)
        memory_c = None if memory is None else memory[: stop - start]
        if early is None:
            factors_c = factors.of(chunk if rows is None else rows[chunk])
            head.run(factors_c, start, memory=memory_c, row_scale=scale)
        else:
            factors_c, early = early.of(slice(stop)), None
        if memory_c is not None and any(wanted):
            gradients.add(factors_c, memory_c, chunk)
    memory = memory_c = factors_c = None  # freed before a float32 dweight is rounded
    return head.losses[:n], supervised, gradients.finish()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: _Problem, *inputs: Any) -> Tensor:
        wanted = problem.wanted if problem.gradients_in_forward else Wanted()
        head_inputs = HeadInputs(*inputs)
        device_type = head_inputs.hidden_states.device.type
        with torch.autocast(device_type, enabled=False):
            losses, supervised, gradients = _run_chunks(
                problem, head_inputs, problem.factors, wanted
            )
            losses = losses * problem.factors[: len(losses)]
        ctx.problem, ctx.supervised = problem, supervised
        ctx.gradients = gradients if problem.gradients_in_forward else None
        # what is no tensor needs no saving: a quantised weight
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(v if isinstance(v, Tensor) else None for v in inputs))
        return supervised.scatter(losses) if problem.reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        refuse_second_derivative("linear_cross_entropy")
        problem: _Problem = ctx.problem
        supervised: Supervised = ctx.supervised
        per_token = problem.reduction == "none"
        # given away: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            factors = problem.factors[: len(supervised.labels)]
            row_scale = factors * (supervised.gather(grad_output) if per_token else grad_output)
            pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
            inputs = HeadInputs(*(other if saved is None else saved for saved, other in pairs))
            with torch.autocast(grad_output.device.type, enabled=False):
                *_, gradients = _run_chunks(problem, inputs, row_scale, problem.wanted, supervised)
        elif per_token:
            # through the supervised rows: 0 * inf of an ignored token would be nan
            upstream = supervised.scatter(supervised.gather(grad_output))
            for each in gradients:
                if each is not None:
                    each.mul_(upstream[:, None])
        else:
            scale_([each for each in gradients if each is not None], grad_output)
        return None, *gradients


@runs_eagerly
def linear_cross_entropy(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor | QuantizedWeight,  # (V, H)
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
) -> Tensor:
    """``cross_entropy(linear(hidden_states, weight, bias), labels)`` without the (N, V) logits.

    Named after, and equal to, ``torch.nn.functional.linear_cross_entropy`` wherever both are
    defined. Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the softmax is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype.

    Args:
        hidden_states: (N, H).
        weight: (V, H), on the same device. A ``QuantizedWeight`` has no gradient and is dequantised
            64 MiB at a time.
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
            tokens.
        chunk_mib: MiB of logits held at once, > 0; at least one token's row. By default 512, or
            256 where the weight needs no gradient. Where a 16-bit gradient of the weight would be
            summed over more than 16 chunks, more logits are held, or the sum is kept in float32,
            whichever takes less memory.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 inputs. Without a
        supervised token the loss is 0 with zero gradients, where PyTorch's mean is nan.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    named = {"hidden_states": hidden_states, "bias": bias, "labels": labels}
    refuse_others_than_tensors(**named, class_weight=class_weight, token_weight=token_weight)
    if not isinstance(weight, Tensor) and not hasattr(weight, "rows"):
        raise ValueError(
            f"weight must be a tensor or a QuantizedWeight, got {type(weight).__name__}"
        )
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states must have shape (N, H), got {tuple(hidden_states.shape)}")
    hidden_size = hidden_states.shape[1]
    if len(weight.shape) != 2 or weight.shape[1] != hidden_size or not weight.shape[0]:
        raise ValueError(f"weight must have shape (V, {hidden_size}), got {tuple(weight.shape)}")
    vocab_size, device = weight.shape[0], hidden_states.device
    if bias is not None and tuple(bias.shape) != (vocab_size,):
        raise ValueError(f"bias must have shape ({vocab_size},), got {tuple(bias.shape)}")
    low_rank_states, low_rank_weight = _checked_low_rank(low_rank, len(hidden_states), vocab_size)
    inputs = HeadInputs(hidden_states, weight, bias, low_rank_states, low_rank_weight)
    for name, tensor in inputs._asdict().items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on {device} as hidden_states are, got {tensor.device}"
            )
    if chunk_mib is not None and not (isinstance(chunk_mib, Real) and 0 < chunk_mib < math.inf):
        raise ValueError(f"chunk_mib must be a finite number > 0, got {chunk_mib!r}")
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight)
    options.check(vocab_size, device)
    check_tokens(
        labels,
        len(hidden_states),
        device,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )
    dtype = _product_dtype(hidden_states, weight, bias)
    tokens = order_tokens(labels, vocab_size, ignore_index)
    factors = token_factors(
        labels,
        tokens.counts[0],
        options,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        dtype=accumulation_dtype(dtype),
    )
    wanted = Wanted.by(inputs)
    problem = _Problem(
        tokens,
        factors.contiguous() if token_weight is None else factors.index_select(0, tokens.rows),
        options,
        reduction,
        dtype,
        int(min(chunk_mib or default_chunk_mib(wanted.weight), MAX_CHUNK_MIB) * MIB),
        wanted,
    )
    return _LinearCrossEntropy.apply(problem, *inputs)


def _checked_low_rank(
    low_rank: tuple[Tensor, Tensor] | None, tokens: int, vocab_size: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if low_rank is None:
        return None, None
    if not (
        isinstance(low_rank, (tuple, list))
        and len(low_rank) == 2
        and all(isinstance(each, Tensor) for each in low_rank)
    ):
        raise ValueError(f"low_rank must be two tensors, (N, R) and (V, R), got {low_rank!r:.80}")
    states, weight = low_rank
    if states.dim() != 2 or len(states) != tokens or not states.shape[1]:
        raise ValueError(f"low_rank[0] must have shape ({tokens}, R), got {tuple(states.shape)}")
    if tuple(weight.shape) != (vocab_size, states.shape[1]):
        raise ValueError(
            f"low_rank[1] must have shape ({vocab_size}, {states.shape[1]}), "
            f"got {tuple(weight.shape)}"
        )
    for i, tensor in enumerate(low_rank):
        if not tensor.is_floating_point():
            raise ValueError(f"low_rank[{i}] must be a floating-point tensor, got {tensor.dtype}")
    return states, weight


def _product_dtype(
    hidden_states: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None
) -> torch.dtype:
    """The dtype that ``torch.nn.functional.linear`` would compute in, now."""
    inputs = {"hidden_states": hidden_states, "weight": weight} | (
        {} if bias is None else {"bias": bias}
    )
    for name, tensor in inputs.items():
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    dtypes = {name: tensor.dtype for name, tensor in inputs.items()}
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type) and torch.float64 not in dtypes.values():
        return torch.get_autocast_dtype(device_type)
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {dtypes}"
        )
    return hidden_states.dtype
