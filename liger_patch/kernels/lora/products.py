"""Matrix products of linear layers with LoRA adapters, forward and backward.

N: tokens, H: features of x, O: of y, R: rank. The formulas are in ``linears``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels import fp8
from liger_patch.kernels.backend import serves_triton
from liger_patch.kernels.fp8 import Fp8Rows, Fp8Weight
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.kernels.products import product_

# the features of its input that an adapter sees: None for all, a mask (N, H), or a hash's seed (),
# on the CPU: autograd saves both in the same way
Kept = Tensor | None
MAX_RANK = 64  # of the Triton kernels: a tile holds all of them


def thin_products(
    x: Tensor,  # (N, H)
    a: Tensor,  # (sum of R, H)
    parts: Sequence[LoraProjection],
    seeds: Sequence[Kept] | None = None,
) -> tuple[Tensor, list[Kept]]:
    """Return s (N, sum of R), and which features of x each projection sees.

    Args:
        seeds: those of an earlier call, to drop the same features again; None draws new ones.
    """
    if not any([part.dropout for part in parts]):
        return x @ a.t(), [None] * len(parts)
    s = x.new_empty(len(x), len(a))
    columns = zip(parts, columns_of(s, parts), seeds or [None] * len(parts), strict=True)
    return s, [thin_product_(each, x, p.a, p.dropout, seed) for p, each, seed in columns]


def thin_product_(s: Tensor, x: Tensor, a: Tensor, dropout: float, seed: Kept) -> Kept:
    """Write ``dropout(x) A'`` to s (N, R), and return which features of x are kept."""
    if not dropout:
        torch.mm(x, a.t(), out=s)
        return None
    if serves_lora(x, a):
        from liger_patch.kernels.triton.dropout import dropped_product_

        seed = new_seed() if seed is None else seed
        dropped_product_(s, x.contiguous(), a.contiguous(), int(seed), dropout)
        return seed
    seen, mask = torch.native_dropout(x.contiguous(), dropout, True)  # CUDA's depends on strides
    torch.mm(seen, a.t(), out=s)
    return mask


def new_seed() -> Tensor:
    """Return a seed () that PyTorch's CPU generator draws: checkpoints restore its state."""
    return torch.randint(2**31 - 1, (), device="cpu")


def serves_lora(x: Tensor, *matrices: Tensor) -> bool:
    """Return True if Triton kernels serve adapters with these A beside such a matrix."""
    rank = max([a.shape[0] for a in matrices])
    # Triton's interpreter multiplies the bits of bf16 as whole numbers
    served = (torch.float16, torch.bfloat16) if x.is_cuda else (torch.float16,)
    return x.dtype in served and serves_triton(x) and x.numel() > 0 and rank <= MAX_RANK


def products(
    x: Tensor,  # (N, H)
    parts: Sequence[LoraProjection],
    s: Sequence[Tensor | None],  # (N, R) each; None without an adapter
    leading: Sequence[int],
) -> list[Tensor]:
    """Return y (*leading, O) of N rows for each projection."""
    x8: Fp8Rows | None = None  # of all bases in FP8
    ys: list[Tensor] = []
    for part, thin in zip(parts, s, strict=True):
        weight, bias = part.weight, None if part.bias is None else part.bias.to(x.dtype)
        if isinstance(weight, Fp8Weight) and weight.multiplies(x.dtype):
            x8 = fp8.quantized((x,)) if x8 is None else x8
            y = x.new_empty(*leading, weight.shape[0])
            rows = y.view(len(x), weight.shape[0])
            fp8.scaled_product(x8, weight.numbers, weight.scales, bias, rows)
            if thin is not None:  # a product in FP8 cannot add
                rows.addmm_(thin, part.b.t(), alpha=part.scaling)
        elif thin is None and bias is None:
            y = linear(x.view(*leading, x.shape[1]), weight.to(x.dtype))
        else:  # no view, as ``linear`` with a bias would be: autograd lets none be written to
            y = x.new_empty(*leading, weight.shape[0])
            rows = y.view(len(x), weight.shape[0])
            first, beta = (rows, 0.0) if bias is None else (bias, 1.0)
            if thin is not None:
                # what the adapter gives first: the base's product adds to it as it writes, and no
                # pass over y is needed for the sum
                torch.addmm(first, thin, part.b.t(), beta=beta, alpha=part.scaling, out=rows)
                first = rows
            torch.addmm(first, x, weight.to(x.dtype).t(), out=rows)
        ys.append(y)
    return ys


def through_base(dy: Tensor, part: LoraProjection) -> Tensor:
    """Return the gradient (N, H) of the base's input, of dy (N, O)."""
    weight = part.weight
    if isinstance(weight, Fp8Weight) and weight.multiplies(dy.dtype):
        return fp8.input_gradient((dy,), (weight,))
    return dy @ weight.to(dy.dtype)


def upstream_thin_products(
    dys: Sequence[Tensor | None],  # (N, O) each
    parts: Sequence[LoraProjection],
    s: Tensor,  # (N, sum of R)
) -> Tensor:
    """Return ds, of the shape of s; columns without an upstream gradient are zero."""
    ds = torch.empty_like(s, memory_format=torch.contiguous_format)
    for dy, part, columns in zip(dys, parts, columns_of(ds, parts), strict=True):
        if dy is None:
            columns.zero_()
        else:
            torch.addmm(columns, dy, part.b, beta=0, alpha=part.scaling, out=columns)
    return ds


def gradients_of_input_(
    dx: Tensor | None,  # (N, H)
    x: Tensor | None,  # (N, H); None without adapters or trained weights
    a: Tensor | None,  # (sum of R, H); None without adapters
    dys: Sequence[Tensor | None],  # (N, O) each
    parts: Sequence[LoraProjection],
    ds: Tensor | None,  # (N, sum of R)
    kept: Sequence[Kept],
    dtypes: Sequence[torch.dtype | None],
) -> list[Tensor | None]:
    """Write to dx what comes through bases and adapters. Return dA of each in its dtype, None for
    None.
    """
    is_whole = {*kept} == {None}  # each adapter sees all features
    if dx is not None:
        others, dys8, weights8 = [], [], []
        for dy, part in zip(dys, parts, strict=True):
            weight = part.weight
            if dy is None:
                continue
            if isinstance(weight, Fp8Weight) and weight.multiplies(dy.dtype):
                dys8.append(dy)
                weights8.append(weight)
            else:
                others.append((dy, part))
        add = bool(dys8)
        if dys8:  # first: these products cannot add
            total = fp8.input_gradient(dys8, weights8, dx if dx.dtype == dys8[0].dtype else None)
            if total is not dx:
                dx.copy_(total)
        if is_whole and ds is not None and a is not None:
            product_(dx, ds, a, add=add)
            add = True
        for dy, part in others:
            product_(dx, dy, part.weight.to(dy.dtype), add=add)
            add = True
    wanted = set(dtypes) - {None}
    if ds is None or x is None:  # no adapters
        return [None] * len(parts)
    if not is_whole or len(wanted) > 1:
        each = zip(parts, columns_of(ds, parts), kept, dtypes, strict=True)
        left = None if is_whole else dx
        return [adapter_gradient_(left, x, part.a, *rest, part.dropout) for part, *rest in each]  # pyright: ignore[reportCallIssue]
    if not wanted:
        return [None] * len(parts)
    da = product_(x.new_empty(ds.shape[1], x.shape[1], dtype=wanted.pop()), ds.t(), x)
    rows = da.split([len(part.a) for part in parts])
    return [None if dtype is None else each for each, dtype in zip(rows, dtypes, strict=True)]


def adapter_gradient_(
    dx: Tensor | None,  # (N, H)
    x: Tensor,  # (N, H)
    a: Tensor,  # (R, H)
    ds: Tensor,  # (N, R)
    kept: Kept,
    dtype: torch.dtype | None,
    dropout: float,
) -> Tensor | None:
    """Add to dx what comes through one adapter. Return its dA in a dtype, or None without one."""
    if dx is None and dtype is None:
        return None
    if kept is not None and kept.dim() == 0:
        from liger_patch.kernels.triton.dropout import dropped_gradients

        da = dropped_gradients(dx, x.contiguous(), a.contiguous(), ds, int(kept), dropout)
        return None if dtype is None else da.to(dtype)
    if kept is None:
        if dx is not None:
            product_(dx, ds, a, add=True)
    else:
        x = x * kept * (1.0 / (1.0 - dropout))
        if dx is not None:
            dx += (ds @ a).mul_(kept).mul_(1.0 / (1.0 - dropout))
    return None if dtype is None else product_(a.new_empty(a.shape, dtype=dtype), ds.t(), x)


def b_gradients(
    dys: Sequence[Tensor | None],  # (N, O) each
    parts: Sequence[LoraProjection],
    s: Tensor,  # (N, sum of R)
    dtypes: Sequence[torch.dtype | None],
) -> list[Tensor | None]:
    """Return dB (O, R) of each projection in its dtype, None for None."""
    found: list[Tensor | None] = []
    for dy, part, thin, dtype in zip(dys, parts, columns_of(s, parts), dtypes, strict=True):
        db = None
        if dy is not None and dtype is not None:
            db = dy.new_empty(part.b.shape, dtype=dtype)
            product_(db, dy.t(), thin, alpha=part.scaling)
        found.append(db)
    return found


def base_gradients(
    dy: Tensor,  # (N, O)
    x: Tensor,  # (N, H)
    part: LoraProjection,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias, None where they are not wanted."""
    wants_weight, wants_bias = wanted
    dweight = dbias = None
    if wants_weight and isinstance(part.weight, Tensor):
        dweight = product_(torch.empty_like(part.weight), dy.t(), x)
    if wants_bias and part.bias is not None:
        dbias = dy.sum(0, dtype=part.bias.dtype)
    return dweight, dbias


def columns_of(s: Tensor, parts: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    """Return the columns (N, R) of s that belong to each projection."""
    return (s,) if len(parts) == 1 else s.split([part.a.shape[0] for part in parts], 1)
