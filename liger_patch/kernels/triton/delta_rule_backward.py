"""Triton form of the backward pass of the gated delta rule, for operands of 16 bits. The formulas
and letters are in ``delta_rule``.

T, w, n and the states are computed again. A loop over the chunks, from the last to the first, holds
the gradient of the state in registers; all else is one program for each chunk of each head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.delta_rule import (
    L2_EPS,
    STATE_BLOCK,
    WARPS,
    compute_states,
    factors,
    of_tokens,
    pair_decay,
    sizes_of,
    stages_of,
    strided,
    tile,
    unit_tile,
)
from liger_patch.kernels.triton.launch import launch

BLOCK = 32  # features of v of one step of a chunk's gradients: with 64, sm_90 has no more registers
GRADIENT_WARPS = 8


@triton.jit
def _through_length(dx, ptr, stride, row, is_row, column, NORMALIZE: tl.constexpr):
    """Return the gradient of the rows that ``unit_tile`` has read, from that of its result."""
    if NORMALIZE:
        x = tile(ptr, stride, row, is_row, column).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)[:, None]
        x *= inverse
        dx = (dx - x * tl.sum(x * dx, 1)[:, None]) * inverse
    return dx


@triton.jit
def _state_gradients_kernel(
    q_ptr,  # (B T, H / GROUP, K)
    q_stride,
    k_ptr,  # (B T, H / GROUP, K)
    k_stride,
    do_ptr,  # (B T, H, V)
    do_stride,
    w_ptr,  # (B, H, N, C, K)
    dnew_ptr,  # (B, H, N, C, V): that of the chunk's own results, becomes that of all
    dstates_ptr,  # (B, H, N, K, V): of those behind the chunks
    total_ptr,  # (B, H, N, C)
    ids_ptr,  # (B, N C), or None
    tokens,
    heads,
    chunks,
    scale,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per head and block of the features of v, from the last chunk to the first."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row, k_feature = tl.arange(0, CHUNK), tl.arange(0, DIM_K)
    v_feature = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    q_ptr += batch * tokens * q_stride + head // GROUP * DIM_K
    k_ptr += batch * tokens * k_stride + head // GROUP * DIM_K
    do_ptr += batch * tokens * do_stride + head * DIM_V
    if ids_ptr is not None:
        ids_ptr += batch * chunks * CHUNK
    dstate = tl.zeros((DIM_K, BLOCK_V), tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        place = pair * chunks + chunk
        dstates = dstates_ptr + place * DIM_K * DIM_V
        tl.store(dstates + k_feature[:, None] * DIM_V + v_feature[None, :], dstate)
        token = chunk * CHUNK + row
        is_row = token < tokens
        token = token.to(tl.int64)
        own_ids = ids_ptr if ids_ptr is None else ids_ptr + chunk * CHUNK
        start, end, whole = factors(  # pyright: ignore
            total_ptr + place * CHUNK, own_ids, chunk, CHUNK
        )
        k = unit_tile(k_ptr, k_stride, token, is_row, k_feature, NORMALIZE)
        rows = place * CHUNK + row
        new_place = rows[:, None] * DIM_V + v_feature[None, :]
        dnew = tl.load(dnew_ptr + new_place).to(tl.float32)
        dnew += tl.dot(k, dstate.to(k.dtype)) * end[:, None]
        dnew = dnew.to(k.dtype)
        tl.store(dnew_ptr + new_place, dnew)
        q = unit_tile(q_ptr, q_stride, token, is_row, k_feature, NORMALIZE)
        do = tile(do_ptr, do_stride, token, is_row, v_feature).to(tl.float32)
        do = (do * (start * scale)[:, None]).to(q.dtype)
        w = tl.load(w_ptr + rows[:, None] * DIM_K + k_feature[None, :])
        dstate = dstate * whole + tl.dot(tl.trans(q), do)
        dstate -= tl.dot(tl.trans(w), dnew)


@triton.jit
def _chunk_gradients_kernel(
    q_ptr,  # (B T, H / GROUP, K)
    q_stride,
    k_ptr,  # (B T, H / GROUP, K)
    k_stride,
    v_ptr,  # (B T, H, V)
    v_stride,
    do_ptr,  # (B T, H, V)
    do_stride,
    total_ptr,  # (B, H, N, C)
    beta_ptr,  # (B, T, H)
    ids_ptr,  # (B, N C), or None
    inverse_ptr,  # (B, H, N, C, C): T
    new_ptr,  # (B, H, N, C, V)
    dnew_ptr,  # (B, H, N, C, V)
    states_ptr,  # (B, H, N, K, V)
    dstates_ptr,  # (B, H, N, K, V)
    dq_ptr,  # (B, T, H, K)
    dk_ptr,  # (B, T, H, K)
    dv_ptr,  # (B, T, H, V)
    dg_ptr,  # (B, T, H)
    dbeta_ptr,  # (B, T, H)
    tokens,
    heads,
    scale,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per chunk of a head."""
    pair, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    place = pair * tl.num_programs(1) + chunk
    first = batch * tokens + chunk * CHUNK
    row, k_feature = tl.arange(0, CHUNK), tl.arange(0, DIM_K)
    is_row = row < tokens - chunk * CHUNK
    total_ptr += place * CHUNK
    if ids_ptr is not None:
        ids_ptr += (batch * tl.num_programs(1) + chunk) * CHUNK
    start, end, whole = factors(total_ptr, ids_ptr, chunk, CHUNK)  # pyright: ignore
    of_token = first * heads + head
    beta = of_tokens(beta_ptr + of_token, row, is_row, heads)
    inverse_place = row[:, None] * CHUNK + row[None, :]
    inverse = tl.trans(tl.load(inverse_ptr + place * CHUNK * CHUNK + inverse_place))
    v_ptr += first * v_stride + head * DIM_V
    do_ptr += first * do_stride + head * DIM_V
    rows = place * CHUNK + row
    dq = tl.zeros((CHUNK, DIM_K), tl.float32)
    dk = tl.zeros((CHUNK, DIM_K), tl.float32)
    dw = tl.zeros((CHUNK, DIM_K), tl.float32)
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dinverse = tl.zeros((CHUNK, CHUNK), tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    through = 0.0
    for block in range(0, DIM_V, BLOCK_V):
        v_feature = block + tl.arange(0, BLOCK_V)
        of_state = place * DIM_K * DIM_V + k_feature[:, None] * DIM_V + v_feature[None, :]
        state, dstate = tl.load(states_ptr + of_state), tl.load(dstates_ptr + of_state)
        of_new = rows[:, None] * DIM_V + v_feature[None, :]
        new, dnew = tl.load(new_ptr + of_new), tl.load(dnew_ptr + of_new)
        do = tile(do_ptr, do_stride, row, is_row, v_feature)
        dscores = tl.dot(do, tl.trans(new), dscores)
        do = (do.to(tl.float32) * (start * scale)[:, None]).to(do.dtype)
        dq = tl.dot(do, tl.trans(state), dq)
        dw = tl.dot(dnew, tl.trans(state), dw)
        new = (new.to(tl.float32) * end[:, None]).to(new.dtype)
        dk = tl.dot(new, tl.trans(dstate), dk)
        through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        v = tile(v_ptr, v_stride, row, is_row, v_feature)
        wide = v.to(tl.float32)
        dinverse = tl.dot(dnew, tl.trans((wide * beta[:, None]).to(v.dtype)), dinverse)
        dvalues = tl.dot(inverse, dnew)
        dbeta += tl.sum(dvalues * wide, 1)
        at = (first + row)[:, None] * heads * DIM_V + head * DIM_V + v_feature[None, :]
        tl.store(dv_ptr + at, dvalues * beta[:, None], mask=is_row[:, None])
    q_ptr += first * q_stride + head // GROUP * DIM_K
    k_ptr += first * k_stride + head // GROUP * DIM_K
    k = unit_tile(k_ptr, k_stride, row, is_row, k_feature, NORMALIZE)
    to_end = tl.sum(k.to(tl.float32) * dk, 1)
    dw = (-dw).to(k.dtype)
    written = (k.to(tl.float32) * (beta * start)[:, None]).to(k.dtype)
    dinverse = tl.dot(dw, tl.trans(written), dinverse)
    # of 1 + lower: -T' dT T'
    dlower = tl.dot(tl.dot(inverse, dinverse.to(k.dtype)).to(k.dtype), inverse)
    decay = pair_decay(total_ptr, ids_ptr, row, row)
    is_below = row[:, None] > row[None, :]
    dlower *= tl.where(is_below, -decay, 0.0)
    within = dlower * tl.dot(k, tl.trans(k))
    dbeta += tl.sum(within, 1)
    within *= beta[:, None]
    from_start = tl.sum(within, 1) - tl.sum(within, 0)
    dproducts = (dlower * beta[:, None]).to(k.dtype)
    q = unit_tile(q_ptr, q_stride, row, is_row, k_feature, NORMALIZE)
    from_start += tl.sum(q.to(tl.float32) * dq, 1)
    dscores *= decay * scale
    within = tl.where(is_below, dscores * tl.dot(q, tl.trans(k)), 0.0)
    from_start += tl.sum(within, 1) - tl.sum(within, 0)
    dscores = dscores.to(k.dtype)
    at = (first + row)[:, None] * heads * DIM_K + head * DIM_K + k_feature[None, :]
    dq = tl.dot(dscores, k, dq)
    dq = _through_length(dq, q_ptr, q_stride, row, is_row, k_feature, NORMALIZE)
    tl.store(dq_ptr + at, dq, mask=is_row[:, None])
    dk = tl.dot(tl.trans(dscores), q, dk)
    dk = tl.dot(dproducts, k, tl.dot(tl.trans(dproducts), k, dk))
    dwritten = tl.dot(inverse, dw) * start[:, None]
    dk += dwritten * beta[:, None]
    dk = _through_length(dk, k_ptr, k_stride, row, is_row, k_feature, NORMALIZE)
    tl.store(dk_ptr + at, dk, mask=is_row[:, None])
    dwritten = tl.sum(dwritten * k.to(tl.float32), 1)
    of_token += row * heads
    tl.store(dbeta_ptr + of_token, dbeta + dwritten, mask=is_row)
    # g of a token scales what passes it: from the chunk's start, to its end, through, and within
    from_start += dwritten * beta
    dg = tl.cumsum(from_start, 0, reverse=True) + tl.cumsum(to_end, 0) - to_end
    tl.store(dg_ptr + of_token, dg + through * whole, mask=is_row)


def gated_delta_rule_backward(
    do: Tensor,  # (B T, H, V)
    q: Tensor,  # (B T, H / groups, K)
    k: Tensor,  # (B T, H / groups, K)
    v: Tensor,  # (B T, H, V)
    g: Tensor,  # (B, T, H)
    beta: Tensor,  # (B, T, H)
    ids: Tensor | None,  # (B, N C) int32
    scale: float,
    normalize: bool,
    chunk: int,  # C
    dq: Tensor,  # (B, T, H, K)
    dk: Tensor,  # (B, T, H, K)
    dv: Tensor,  # (B, T, H, V)
    dg: Tensor,  # (B, T, H)
    dbeta: Tensor,  # (B, T, H)
) -> None:
    """Write the gradients; those of q and k for each head of v. Features and heads of the
    arguments are contiguous; all else is.
    """
    sizes = sizes_of(q, v, normalize, chunk)
    batch, tokens, heads = g.shape
    total, inverse, (w, dnew), new, states = compute_states(q, k, v, do, g, beta, ids, scale, sizes)
    chunks = total.shape[2]
    dstates = torch.empty_like(states)
    block = min(STATE_BLOCK, sizes["DIM_V"])
    launch(
        _state_gradients_kernel,
        (batch * heads, sizes["DIM_V"] // block),
        *strided(q, k, do),
        *(w, dnew, dstates, total, ids, tokens, heads, chunks, scale),
        **sizes,
        BLOCK_V=block,
        STAGES=stages_of(q.device),
        num_warps=WARPS,
    )
    launch(
        _chunk_gradients_kernel,
        (batch * heads, chunks),
        *strided(q, k, v, do),
        *(total, beta, ids, inverse, new, dnew, states, dstates),
        *(dq, dk, dv, dg, dbeta, tokens, heads, scale),
        **sizes,
        BLOCK_V=min(BLOCK, sizes["DIM_V"]),
        num_warps=GRADIENT_WARPS,
    )
