"""The gated delta rule (arXiv:2412.06464), as layers of linear attention have it. Each head has a
state S (K, V), which is 0 before the first token of a sequence:

    S <- exp(g) S                  S <- S + beta k' (v - k S)                  o = scale q S

Chunks of C = 64 tokens are computed together, in products (arXiv:2406.06484). With G the sum of g
from a chunk's first token on, D_ij = exp(G_i - G_j) for j <= i, and S the state before the chunk:

    T = (1 + tril(beta k k' * D, -1)) ** -1       w = T (beta exp(G) k)       u = T (beta v)
    n = u - w S        o = scale (exp(G) q S + tril(q k' * D) n)
    S <- exp(G_last) S + (exp(G_last - G) k)' n

Factors between tokens of two sequences are 0, so a row may hold several. If that is asked for, rows
of q and k are divided by their lengths, sqrt(sum(x ** 2) + 1e-6), where they are read.

B: batch, T: tokens, H: heads of v, whose k and q a group of them shares, N: chunks. Saved for the
backward pass: the arguments. Both passes hold the states before all chunks, B H N K V numbers, and
some times the size of v. Products are float32 (float64 for float64); in 16 bits, Triton's have
operands of 16 bits; T is inverted in float32.
"""

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    TensorDescriptor,
    accumulation_dtype,
    check_backward,
    serves_triton,
    without_autocast,
)
from liger_patch.kernels.graphs import differentiable, operator

CHUNK = 64  # tokens: the tensor cores' tiles, and a T that needs few steps
TRITON_DIMS = 16, 32, 64, 128  # features of a head: powers of two, of the tensor cores' sizes
# those of q and v on a GPU: with 16 and 32, Triton 3.6 reads out of bounds on an H100
GPU_DIMS = 64, 128
PROBED = 16, 1024, 1031  # Triton compiles kernels for multiples of 16, and for other numbers
LARGEST_ERROR = 0.1  # of the largest number, where products have operands of 16 bits
L2_EPS = 1e-6  # of Transformers' and fla's l2norm


class _Chunks(NamedTuple):
    """The arguments in chunks (B, H, N, C, ...), and what follows from them but for the states."""

    q: Tensor  # (B, H, N, C, K)
    k: Tensor  # (B, H, N, C, K)
    v: Tensor  # (B, H, N, C, V)
    beta: Tensor  # (B, H, N, C, 1)
    start: Tensor  # (B, H, N, C, 1): exp(G), 0 in another sequence than the chunk before
    end: Tensor  # (B, H, N, C, 1): exp(G_last - G), 0 in another sequence than the last token
    whole: Tensor  # (B, H, N, 1, 1): exp(G_last), 0 where a sequence ends within
    decay: Tensor  # (B, H, N, C, C): D
    products: Tensor  # (B, H, N, C, C): tril(k k' * D, -1)
    inverse: Tensor  # (B, H, N, C, C): T


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence_ids: Tensor | None
) -> _Chunks:
    dtype, heads = accumulation_dtype(q.dtype), v.shape[2]
    g, beta = (_padded(each, dtype) for each in (g, beta))
    q, k = (_heads(each, dtype).repeat_interleave(heads // each.shape[2], 1) for each in (q, k))
    total = g.cumsum(-1)
    start, end, whole = total, total[..., -1:] - total, total[..., -1:]
    is_seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    if sequence_ids is not None:
        ids = _padded_ids(sequence_ids).unflatten(1, (-1, CHUNK))[:, None]
        last = ids[..., -1:]
        before = torch.cat((ids[:, :, :1, :1], last[:, :, :-1]), 2)
        start = start.masked_fill(ids != before, -torch.inf)
        end = end.masked_fill(ids != last, -torch.inf)
        whole = whole.masked_fill(last != before, -torch.inf)
        is_seen = is_seen & (ids[..., None] == ids[..., None, :])
    decay = (total[..., None] - total[..., None, :]).masked_fill(~is_seen, -torch.inf).exp()
    products = (k @ k.mT * decay).tril(-1)
    eye = torch.eye(CHUNK, dtype=dtype, device=q.device)
    lower = beta[..., None] * products
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    start, end, whole = (each.exp()[..., None] for each in (start, end, whole))
    v, beta = _heads(v, dtype), beta[..., None]
    return _Chunks(q, k, v, beta, start, end, whole, decay, products, inverse)


def _padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, T, H) as contiguous (B, H, N, C), with zeros behind the last token."""
    x = torch.nn.functional.pad(x.transpose(1, 2).to(dtype), (0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (-1, CHUNK)).contiguous()


def _padded_ids(sequence_ids: Tensor) -> Tensor:
    """Return (B, T) as int32 (B, N C); what is behind the last token belongs to its sequence."""
    rest = sequence_ids[:, -1:].expand(-1, -sequence_ids.shape[1] % CHUNK)
    return torch.cat((sequence_ids, rest), 1).int()


def _serves_triton(normalize: bool, *tensors: Tensor) -> bool:
    """Return True if Triton's kernels serve tensors of these dtypes and numbers of features."""
    first = tensors[0]
    if TensorDescriptor is None:  # Triton 3.2 aborts where it compiles the gradients for Hopper
        return False
    # bf16 only on GPUs: Triton's interpreter does not multiply it
    served = (torch.float16, torch.bfloat16) if first.is_cuda else (torch.float16,)
    if first.dtype not in served or not serves_triton(*tensors):
        return False
    dims = {x.shape[-1] for x in tensors}
    if not all(x.dtype == first.dtype for x in tensors) or not dims <= {*TRITON_DIMS}:
        return False
    if not first.is_cuda:
        return True
    if not dims <= {*GPU_DIMS} or len(dims) > 1:
        return False
    group = tensors[2].shape[2] // first.shape[2]  # of q, k and v
    return is_right(first.device, first.dtype, *dims, group, normalize)


@functools.cache
def is_right(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    group: int,
    normalize: bool = True,
    *,
    sizes: Any = PROBED,
) -> bool:
    """Return whether Triton's kernels, as they are compiled for a device, compute what PyTorch's
    operations do of random tokens: results and gradients, of one sequence and of several. Triton
    3.6 has compiled such loops wrongly. Warn where they do not. Small errors are left to tests.

    Args:
        group: heads of v for one of q and k.
        sizes: heads of q, tokens of one sequence, and of several; tests take smaller ones.
    """
    made = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=device)

    heads, *lengths = sizes
    with torch.no_grad(), without_autocast(device.type):
        for tokens, are_several in zip(lengths, (False, True), strict=True):
            q, k = (numbers(1, tokens, heads, dim) for _ in range(2))
            q, k = q.to(dtype), torch.nn.functional.normalize(k, dim=-1).to(dtype)
            v, do = (numbers(1, tokens, heads * group, dim).to(dtype) for _ in range(2))
            g = -0.1 * numbers(1, tokens, heads * group).abs()
            beta = numbers(*g.shape).sigmoid()
            ids = torch.arange(tokens, device=device)[None] // 100 if are_several else None
            others = g, beta, ids, dim**-0.5, normalize
            ours = [_on_triton(q, k, v, *others), *_backward_on_triton(do, q, k, v, *others)]
            wide = q.float(), k.float(), v.float(), *others
            truth = [_with_pytorch(*wide), *_backward_with_pytorch(do.float(), *wide)]
            for our, true in zip(ours, truth, strict=True):
                if not (our - true).abs().max() < LARGEST_ERROR * true.abs().max():
                    import triton

                    warnings.warn(
                        f"liger_patch: Triton {triton.__version__} computes the gated delta rule "
                        f"wrongly on {device}: PyTorch's operations run in the kernels' place",
                        stacklevel=2,
                    )
                    return False
    return True


def _of_tokens(
    g: Tensor, beta: Tensor, sequence_ids: Tensor | None, scale: float, normalize: bool
) -> tuple[Tensor, Tensor, Tensor | None, float, bool]:
    ids = None if sequence_ids is None else _padded_ids(sequence_ids)
    return g.contiguous(), beta.contiguous(), ids, scale, normalize


def _rows(x: Tensor) -> Tensor:
    """Return (B, T, H, D) as (B T, H, D) of contiguous heads, without a copy where the tokens are a
    stride apart.
    """
    x = x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()
    return x.flatten(0, 1)


def _heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, T, H, D) as (B, H, N, C, D)."""
    x = torch.nn.functional.pad(x.to(dtype), (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    """Return (B, H, N, C, ...) as (B, T, H, ...) of the dtype and the number of tokens of another
    tensor; groups of heads are added up to its number of heads.
    """
    x = x.unflatten(1, (like.shape[2], -1)).sum(2)
    return x.transpose(1, 2).transpose(2, 3).flatten(1, 2)[:, : like.shape[1]].to(like.dtype)


def _states(chunks: _Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before the chunks (B, H, N, K, V), n (B, H, N, C, V) and w."""
    w = chunks.inverse @ (chunks.beta * chunks.start * chunks.k)
    new = chunks.inverse @ (chunks.beta * chunks.v)
    decayed = (chunks.end * chunks.k).mT
    states = new.new_zeros(*w.shape[:3], w.shape[-1], new.shape[-1])
    for i in range(w.shape[2]):
        new[:, :, i] -= w[:, :, i] @ states[:, :, i]
        if i + 1 < w.shape[2]:
            torch.mul(states[:, :, i], chunks.whole[:, :, i], out=states[:, :, i + 1])
            states[:, :, i + 1] += decayed[:, :, i] @ new[:, :, i]
    return states, new, w


def _delta_rule_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape, dtype=q.dtype)


# ``others`` below: g, beta, the ids of sequences or None, the scale, whether to normalize q and k


@operator(_delta_rule_results)
def _gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    sequence_ids: Tensor | None,
    scale: float,
    normalize: bool,
) -> Tensor:
    if not v.numel():
        return _delta_rule_results(q, k, v)
    compute = _on_triton if _serves_triton(normalize, q, k, v) else _with_pytorch
    return compute(q, k, v, g, beta, sequence_ids, scale, normalize)


def _on_triton(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    from liger_patch.kernels.triton import delta_rule as delta_rule_triton

    results = _delta_rule_results(q, k, v, *others)
    rows = _rows(q), _rows(k), _rows(v)
    delta_rule_triton.gated_delta_rule(*rows, *_of_tokens(*others), CHUNK, results)
    return results


def _with_pytorch(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    results = _delta_rule_results(q, k, v, *others)
    with without_autocast(q.device.type):
        q, k = (_unit(x, others[4])[0] for x in (q, k))
        chunks = _chunks(q, k, v, *others[:3])
        states, new, _ = _states(chunks)
        o = (chunks.start * chunks.q) @ states + (chunks.q @ chunks.k.mT * chunks.decay) @ new
    return results.copy_(_tokens(o.mul_(others[3]), results))


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _delta_rule_backward_results(do: Tensor, *others: Any) -> Any:
    return tuple(each.new_empty(each.shape) for each in others[:5])


@operator(_delta_rule_backward_results)
def _gated_delta_rule_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    sequence_ids: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not v.numel():
        return _delta_rule_backward_results(do, q, k, v, g, beta)
    serves = _serves_triton(normalize, q, k, v, do)
    compute = _backward_on_triton if serves else _backward_with_pytorch
    return compute(do, q, k, v, g, beta, sequence_ids, scale, normalize)


def _backward_on_triton(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Gradients:
    from liger_patch.kernels.triton import delta_rule_backward as delta_rule_triton

    results = _delta_rule_backward_results(do, q, k, v, *others)
    per_head = (*v.shape[:3], q.shape[-1])  # of q and k, whose groups are added up
    dq, dk = q.new_empty(per_head), k.new_empty(per_head)
    delta_rule_triton.gated_delta_rule_backward(
        *(_rows(do), _rows(q), _rows(k), _rows(v), *_of_tokens(*others), CHUNK),
        *(dq, dk, *results[2:]),
    )
    for result, each in zip(results[:2], (dq, dk), strict=True):
        torch.sum(each.unflatten(2, (q.shape[2], -1)), 3, out=result)
    return results


def _backward_with_pytorch(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Gradients:
    results = _delta_rule_backward_results(do, q, k, v, *others)
    with without_autocast(q.device.type):
        (q, q_factor), (k, k_factor) = (_unit(x, others[4]) for x in (q, k))
        chunks = _chunks(q, k, v, *others[:3])
        dq, dk, *of_others = _chunk_gradients(chunks, _heads(do, chunks.v.dtype) * others[3])
        dq = _through_unit(_tokens(dq, q), q, q_factor)
        dk = _through_unit(_tokens(dk, k), k, k_factor)
    gradients = dq, dk, *map(_tokens, of_others, results[2:])
    for result, gradient in zip(results, gradients, strict=True):
        result.copy_(gradient)
    return results


def _unit(x: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Return x and None; or x over its lengths, and one over these."""
    if not normalize:
        return x, None
    x = x.to(accumulation_dtype(x.dtype))
    factor = torch.rsqrt(_dot(x, x) + L2_EPS)
    return x * factor, factor


def _through_unit(dx: Tensor, unit: Tensor, factor: Tensor | None) -> Tensor:
    return dx if factor is None else (dx - unit * _dot(unit, dx)) * factor


def _chunk_gradients(chunks: _Chunks, do: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta, in chunks."""
    q, k, v, beta, start, end, whole, decay, products, inverse = chunks
    states, new, w = _states(chunks)
    scores = q @ k.mT * decay
    dnew = scores.mT @ do
    dstates = torch.zeros_like(states)  # of those behind the chunks
    queries, keys = (start * q).mT, end * k
    for i in reversed(range(q.shape[2])):
        dnew[:, :, i] += keys[:, :, i] @ dstates[:, :, i]
        if i:
            torch.mul(dstates[:, :, i], whole[:, :, i], out=dstates[:, :, i - 1])
            dstates[:, :, i - 1] += queries[:, :, i] @ do[:, :, i]
            dstates[:, :, i - 1] -= w[:, :, i].mT @ dnew[:, :, i]
    dscores = do @ new.mT
    within = (dscores * scores).tril(-1)
    dscores *= decay
    dq, dk = start * (do @ states.mT), end * (new @ dstates.mT)
    from_start, to_end = _dot(dq, q), _dot(dk, k)
    dq += dscores @ k
    dk += dscores.mT @ q
    # through w, u and their inverse
    dw = -dnew @ states.mT
    dinverse = dw @ (beta * start * k).mT + dnew @ (beta * v).mT
    dwritten, dvalues = start * (inverse.mT @ dw), inverse.mT @ dnew
    dlower = -(inverse.mT @ dinverse @ inverse.mT).tril(-1)
    dproducts = beta * dlower * decay
    dk += beta * dwritten + dproducts @ k + dproducts.mT @ k
    dwritten = _dot(dwritten, k)
    dbeta = dwritten + _dot(dvalues, v) + _dot(dlower, products)
    # g of a token scales what passes it: from the chunk's start, to its end, through, and within
    from_start += beta * dwritten
    within += beta * dlower * products
    through = whole * (states * dstates).sum((-2, -1), keepdim=True)
    passing = _sums_from(within).tril(-1).sum(-1, keepdim=True)
    dg = _sums_from(from_start) + to_end.cumsum(-2) - to_end + through + passing
    return dq, dk, beta * dvalues, dg[..., 0], dbeta[..., 0]


def _sums_from(x: Tensor) -> Tensor:
    """Return the sums of each row and those behind it."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _save(ctx: Any, inputs: tuple, result: Tensor) -> None:
    *tensors, ctx.scale, ctx.normalize = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("gated_delta_rule", do, advice=LAYER_ADVICE)
    q, k, v, g, beta, sequence_ids = ctx.saved_tensors
    how = sequence_ids, ctx.scale, ctx.normalize
    gradients = _gated_delta_rule_backward(do, q, k, v, g, beta, *how)
    wanted = ctx.needs_input_grad[:5]
    gradients = (g if wants else None for g, wants in zip(gradients, wanted, strict=True))
    return *gradients, None, None, None


# of q and k (B, T, H', K), which consecutive heads of v (B, T, H, V) share; g (B, T, H) <= 0, the
# logarithms of what is left of the state; beta (B, T, H); the ids (B, T) of the rows' sequences
# or None; the scale of q; whether q and k are divided by their lengths: unchecked
run_gated_delta_rule = differentiable(_gated_delta_rule, _save, _backward)
