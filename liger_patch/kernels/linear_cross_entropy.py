"""Cross entropy of ``hidden_states @ weight.T`` and its gradients, without the (N, V) logits.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary, C: tokens in a chunk. Ignored tokens
are dropped first. For each chunk, where gradients are wanted in the forward pass:

    logits = X_c W^T                 one matrix product into a buffer that every chunk reuses
    logits -> losses, G in place     the rows' kernel, G = dloss/dlogits
    dX_c = G W,  dW += G^T X_c       two products; the first chunk writes dW, later ones add to it

so forward and backward cost three matrix products of 2 n H V operations, two with a frozen head,
one without gradients. Extra memory: the gradients themselves and C * V logits. Rounding a 16-bit
dW after each of many chunks would lose accuracy: see ``summed_chunk_bounds``.

The backward pass multiplies by the upstream gradient, and reads and writes nothing where that is 1.
The chunks are computed again, with the upstream gradient in place, where it is not one number
(reduction "none" with a trainable head), where float16 would lose small gradients before a loss
scale reaches them, and in a second backward pass over one graph. Chunking and the gradient in the
forward pass: Liger-Kernel (arXiv:2410.10989).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.chunks import (
    DEFAULT_CHUNK_MIB,
    MIB,
    chunk_bounds,
    summed_chunk_bounds,
)
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.cross_entropy import cross_entropy_rows
from liger_patch.kernels.cross_entropy_pytorch import accumulation_dtype
from liger_patch.kernels.differentiation import refuse_second_derivative
from liger_patch.kernels.loss_options import LossOptions
from liger_patch.kernels.products import product_
from liger_patch.kernels.scale import scale_
from liger_patch.kernels.supervised import Supervised, check_tokens, find_supervised, row_factors

ALIGNED_V = 64  # elements: rows of logits start at 128-byte boundaries, whatever V


class _Wanted(NamedTuple):
    """Which gradients are wanted."""

    hidden_states: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class _Problem:
    """All that one call knows beside the three differentiable tensors."""

    supervised: Supervised
    factors: Tensor  # (n,) of each supervised token's loss in the result
    options: LossOptions
    reduction: str
    dtype: torch.dtype  # of the matrix products and the logits
    chunk_bytes: int
    wanted: _Wanted

    @property
    def gradients_in_forward(self) -> bool:
        """Whether gradients can be computed now and scaled when the upstream one is known."""
        if not any(self.wanted) or self.dtype == torch.float16:
            return False
        return self.reduction != "none" or not (self.wanted.weight or self.wanted.bias)


def _run_chunks(
    problem: _Problem,
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    row_scale: Tensor,  # (n,)
    wanted: _Wanted,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses (n,), and the wanted gradients of the sum of ``row_scale * losses``."""
    labels, rows = problem.supervised.labels, problem.supervised.rows
    n, vocab_size, device = len(labels), weight.shape[0], weight.device
    x, w = hidden_states.to(problem.dtype), weight.to(problem.dtype)
    losses = torch.empty(n, dtype=accumulation_dtype(problem.dtype), device=device)

    dhidden = dweight = dbias = None
    if wanted.hidden_states:
        make = torch.empty if rows is None else torch.zeros  # ignored tokens have zero gradients
        dhidden = make(hidden_states.shape, dtype=hidden_states.dtype, device=device)
    if wanted.bias:
        dbias = torch.zeros(vocab_size, dtype=losses.dtype, device=device)

    row_elements = -(-vocab_size // ALIGNED_V) * ALIGNED_V
    row_bytes = row_elements * problem.dtype.itemsize
    bounds = chunk_bounds(n, row_bytes, problem.chunk_bytes)
    sum_dtype = weight.dtype
    if wanted.weight and sum_dtype.itemsize < losses.dtype.itemsize:
        wide_bytes = weight.numel() * losses.dtype.itemsize
        bounds, widen = summed_chunk_bounds(n, row_bytes, problem.chunk_bytes, wide_bytes)
        sum_dtype = losses.dtype if widen else sum_dtype
    most = bounds[0][1] if bounds else 0
    buffer = torch.empty(most, row_elements, dtype=problem.dtype, device=device)[:, :vocab_size]
    if wanted.weight:
        make = torch.empty if n else torch.zeros  # the first chunk writes
        dweight = make(weight.shape, dtype=sum_dtype, device=device)
    with torch.autocast(device.type, enabled=False):
        for start, stop in bounds:
            x_c = x[start:stop] if rows is None else x.index_select(0, rows[start:stop])
            logits = buffer[: stop - start]
            if bias is None:
                torch.mm(x_c, w.t(), out=logits)
            else:
                torch.addmm(bias.to(problem.dtype), x_c, w.t(), out=logits)
            dlogits = logits if any(wanted) else None
            losses[start:stop] = cross_entropy_rows(
                logits,
                labels[start:stop],
                problem.options,
                dlogits=dlogits,
                row_scale=row_scale[start:stop],
            )
            if dhidden is not None:
                if rows is None:
                    product_(dhidden[start:stop], logits, w)
                else:
                    dhidden.index_copy_(0, rows[start:stop], torch.mm(logits, w).to(dhidden.dtype))
            if dweight is not None:
                product_(dweight, logits.t(), x_c, add=start > 0)
            if dbias is not None:
                dbias += logits.sum(0, dtype=dbias.dtype)
    logits = buffer = None  # freed before dW may need a copy
    if dweight is not None:
        dweight = dweight.to(weight.dtype)
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    return losses, [dhidden, dweight, dbias]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, problem: _Problem
    ) -> Tensor:
        wanted = problem.wanted if problem.gradients_in_forward else _Wanted(False, False, False)
        losses, gradients = _run_chunks(
            problem, hidden_states, weight, bias, problem.factors, wanted
        )
        ctx.problem = problem
        ctx.gradients = gradients if problem.gradients_in_forward else None
        ctx.save_for_backward(hidden_states, weight, bias)
        losses *= problem.factors
        return problem.supervised.scatter(losses) if problem.reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        refuse_second_derivative("linear_cross_entropy")
        problem: _Problem = ctx.problem
        per_token = problem.reduction == "none"
        # given away: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            upstream = problem.supervised.gather(grad_output) if per_token else grad_output
            hidden_states, weight, bias = ctx.saved_tensors
            _, gradients = _run_chunks(
                problem, hidden_states, weight, bias, problem.factors * upstream, problem.wanted
            )
        elif per_token:
            # through the supervised rows: 0 * inf of an ignored token would be nan
            upstream = problem.supervised.scatter(problem.supervised.gather(grad_output))
            gradients[0].mul_(upstream[:, None])
        else:
            for gradient in gradients:
                if gradient is not None:
                    scale_(gradient, grad_output)
        return *gradients, None


@runs_eagerly
def linear_cross_entropy(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # (V,)
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    chunk_mib: float = DEFAULT_CHUNK_MIB,
) -> Tensor:
    """``cross_entropy(linear(hidden_states, weight, bias), labels)`` without the (N, V) logits.

    Named after, and equal to, ``torch.nn.functional.linear_cross_entropy`` wherever both are
    defined. Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the softmax is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype.

    Args:
        hidden_states: (N, H).
        weight: (V, H), on the same device.
        labels: (N,) integers in [0, V), or ``ignore_index`` where a token is not supervised.
        bias: (V,), added to the logits.
        reduction: "mean", "sum" or "none".
        softcap: logits become ``softcap * tanh(logits / softcap)``, after ``logit_scale``.
        logit_scale: factor on the logits.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss.
        class_weight: (V,), ``weight`` of ``torch.nn.functional.cross_entropy``.
        token_weight: (N,) factor on each token's loss; the mean is then the weighted mean.
        num_items_in_batch: denominator of the mean instead of the (weighted) number of supervised
            tokens.
        chunk_mib: MiB of logits held at once, > 0; at least one token's row. Where a 16-bit
            gradient of the weight would be summed over more than 16 chunks, more logits are held,
            or the sum is kept in float32, whichever takes less memory.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 inputs. Without a
        supervised token the loss is 0 with zero gradients, where PyTorch's mean is nan.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states must have shape (N, H), got {tuple(hidden_states.shape)}")
    tokens, hidden_size = hidden_states.shape
    if weight.dim() != 2 or weight.shape[1] != hidden_size or not weight.shape[0]:
        raise ValueError(f"weight must have shape (V, {hidden_size}), got {tuple(weight.shape)}")
    vocab_size, device = weight.shape[0], hidden_states.device
    if bias is not None and tuple(bias.shape) != (vocab_size,):
        raise ValueError(f"bias must have shape ({vocab_size},), got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on {device} as hidden_states are, got {tensor.device}"
            )
    if not 0 < chunk_mib < math.inf:
        raise ValueError(f"chunk_mib must be a finite number > 0, got {chunk_mib}")
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight)
    options.check(vocab_size, device)
    check_tokens(
        labels,
        tokens,
        device,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )
    dtype = _product_dtype(hidden_states, weight, bias)
    supervised = find_supervised(labels, vocab_size, ignore_index)
    factors = row_factors(
        supervised,
        options,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        dtype=accumulation_dtype(dtype),
    )
    inputs = (hidden_states, weight, bias)
    wanted = _Wanted(
        *(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)
    )
    problem = _Problem(supervised, factors, options, reduction, dtype, int(chunk_mib * MIB), wanted)
    return _LinearCrossEntropy.apply(hidden_states, weight, bias, problem)


def _product_dtype(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype that ``torch.nn.functional.linear`` would compute in, now."""
    inputs = {"hidden_states": hidden_states, "weight": weight} | (
        {} if bias is None else {"bias": bias}
    )
    for name, tensor in inputs.items():
        if not tensor.is_floating_point():
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
