"""Triton form of the gated delta rule, for operands of 16 bits. The formulas and letters are in
``delta_rule``. A chunk's C rows of n, w and u lie together, (B, H, N, C, ...).

The loop over chunks holds the state in registers; all else is one program for each chunk of each
head. No program adds to what another one writes, so results repeat bit by bit. The backward pass is
in ``delta_rule_backward``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import shared_bytes
from liger_patch.kernels.triton.launch import launch

HALF = 32  # rows that are inverted step by step; both halves then are one inverse, by products
STATE_BLOCK = 64  # features of v of a program
WARPS = 4
L2_EPS = tl.constexpr(1e-6)  # of Transformers' and fla's l2norm
PIPELINED = 160 * 1024  # bytes of shared memory with which the next chunk's tiles are on their way


@triton.jit
def tile(ptr, stride, row, is_row, column):
    """Return rows of a matrix, zeros where there is none."""
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=is_row[:, None], other=0.0)


@triton.jit
def unit_tile(ptr, stride, row, is_row, column, NORMALIZE: tl.constexpr):
    """Return rows of q or k, which are divided by their lengths if NORMALIZE."""
    x = tile(ptr, stride, row, is_row, column)
    if NORMALIZE:
        wide = x.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + L2_EPS)[:, None]).to(x.dtype)
    return x


@triton.jit
def of_tokens(ptr, row, is_row, heads):
    """Return a head's numbers of tokens, zeros where there is none."""
    return tl.load(ptr + row * heads, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def factors(total_ptr, ids_ptr, chunk, CHUNK: tl.constexpr):
    """Return the decay of each token from its chunk's start, to its end, and that of the chunk.

    Pointers are those of the chunk's first token.
    """
    row = tl.arange(0, CHUNK)
    total = tl.load(total_ptr + row)
    last_total = tl.load(total_ptr + CHUNK - 1)
    start, end, whole = tl.exp(total), tl.exp(last_total - total), tl.exp(last_total)
    if ids_ptr is not None:
        ids = tl.load(ids_ptr + row)
        last = tl.load(ids_ptr + CHUNK - 1)
        before = tl.load(ids_ptr - tl.where(chunk > 0, 1, 0))
        start = tl.where(ids == before, start, 0.0)
        end = tl.where(ids == last, end, 0.0)
        whole = tl.where(last == before, whole, 0.0)
    return start, end, whole


@triton.jit
def pair_decay(total_ptr, ids_ptr, row, column):
    """Return D of a chunk's rows and columns: 0 above the diagonal and between two sequences."""
    total = tl.load(total_ptr + row)[:, None] - tl.load(total_ptr + column)[None, :]
    is_seen = row[:, None] >= column[None, :]
    if ids_ptr is not None:
        is_seen &= tl.load(ids_ptr + row)[:, None] == tl.load(ids_ptr + column)[None, :]
    return tl.exp(tl.where(is_seen, total, -float("inf")))


@triton.jit
def _lower(k, other_k, beta, total_ptr, ids_ptr, row, column):
    """Return rows and columns of tril(beta k k' * D, -1)."""
    products = tl.dot(k, tl.trans(other_k)) * pair_decay(total_ptr, ids_ptr, row, column)
    return tl.where(row[:, None] > column[None, :], products * beta[:, None], 0.0)


@triton.jit
def _unit_inverse(lower, SIZE: tl.constexpr):
    """Return (1 + lower) ** -1, row by row: each is made of those before it."""
    row = tl.arange(0, SIZE)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for i in range(1, SIZE):
        is_row = (row == i)[:, None]
        weights = tl.sum(tl.where(is_row, lower, 0.0), 0)
        update = tl.sum(weights[:, None] * inverse, 0)
        inverse -= tl.where(is_row, update[None, :], 0.0)
    return inverse


@triton.jit
def _prepare_kernel(
    q_ptr,  # (B T, H / GROUP, K)
    q_stride,
    k_ptr,  # (B T, H / GROUP, K)
    k_stride,
    v_ptr,  # (B T, H, V)
    v_stride,
    do_ptr,  # (B T, H, V), or None
    do_stride,
    g_ptr,  # (B, T, H)
    beta_ptr,  # (B, T, H)
    ids_ptr,  # (B, N C), or None
    total_ptr,  # (B, H, N, C): G
    inverse_ptr,  # (B, H, N, C, C): T
    w_ptr,  # (B, H, N, C, K)
    u_ptr,  # (B, H, N, C, V)
    dnew_ptr,  # (B, H, N, C, V), of the chunk's own results; None where do is
    tokens,
    heads,
    scale,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per chunk of a head: G, T, w and u."""
    pair, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    place = pair * tl.num_programs(1) + chunk
    first = batch * tokens + chunk * CHUNK
    tokens -= chunk * CHUNK  # those from this chunk on
    k_ptr += first * k_stride + head // GROUP * DIM_K
    v_ptr += first * v_stride + head * DIM_V
    g_ptr += first * heads + head
    beta_ptr += first * heads + head
    total_ptr += place * CHUNK
    if ids_ptr is not None:
        ids_ptr += (batch * tl.num_programs(1) + chunk) * CHUNK
    row = tl.arange(0, CHUNK)
    is_row = row < tokens
    tl.store(total_ptr + row, tl.cumsum(of_tokens(g_ptr, row, is_row, heads), 0))
    tl.debug_barrier()  # the program's other threads read it
    k_feature, v_feature = tl.arange(0, DIM_K), tl.arange(0, DIM_V)
    upper_row = tl.arange(0, HALF)
    lower_row = HALF + upper_row
    upper_k = unit_tile(k_ptr, k_stride, upper_row, upper_row < tokens, k_feature, NORMALIZE)
    beta = of_tokens(beta_ptr, upper_row, upper_row < tokens, heads)
    upper = _lower(upper_k, upper_k, beta, total_ptr, ids_ptr, upper_row, upper_row)
    lower_k = unit_tile(k_ptr, k_stride, lower_row, lower_row < tokens, k_feature, NORMALIZE)
    beta = of_tokens(beta_ptr, lower_row, lower_row < tokens, heads)
    across = _lower(lower_k, upper_k, beta, total_ptr, ids_ptr, lower_row, upper_row)
    lower = _lower(lower_k, lower_k, beta, total_ptr, ids_ptr, lower_row, lower_row)
    upper = _unit_inverse(upper, HALF)  # pyright: ignore
    lower = _unit_inverse(lower, HALF)  # pyright: ignore
    across = -tl.dot(lower, tl.dot(across, upper, input_precision="ieee"), input_precision="ieee")
    inverse_ptr += place * CHUNK * CHUNK
    inside = upper_row[:, None] * CHUNK + upper_row[None, :]
    tl.store(inverse_ptr + inside, upper)
    tl.store(inverse_ptr + inside + HALF, tl.zeros((HALF, HALF), tl.float32))
    tl.store(inverse_ptr + inside + HALF * CHUNK, across)
    tl.store(inverse_ptr + inside + HALF * CHUNK + HALF, lower)
    tl.debug_barrier()
    inverse = tl.load(inverse_ptr + row[:, None] * CHUNK + row[None, :])
    start, _, _ = factors(total_ptr, ids_ptr, chunk, CHUNK)  # pyright: ignore
    beta = of_tokens(beta_ptr, row, is_row, heads)[:, None]
    v = tile(v_ptr, v_stride, row, is_row, v_feature)
    rows = place * CHUNK + row
    u = tl.dot(inverse, (v.to(tl.float32) * beta).to(v.dtype))
    tl.store(u_ptr + rows[:, None] * DIM_V + v_feature[None, :], u)
    k = unit_tile(k_ptr, k_stride, row, is_row, k_feature, NORMALIZE)
    w = tl.dot(inverse, (k.to(tl.float32) * (beta * start[:, None])).to(k.dtype))
    tl.store(w_ptr + rows[:, None] * DIM_K + k_feature[None, :], w)
    if do_ptr is not None:
        q_ptr += first * q_stride + head // GROUP * DIM_K
        do_ptr += first * do_stride + head * DIM_V
        q = unit_tile(q_ptr, q_stride, row, is_row, k_feature, NORMALIZE)
        scores = tl.dot(k, tl.trans(q)) * tl.trans(pair_decay(total_ptr, ids_ptr, row, row))
        do = tile(do_ptr, do_stride, row, is_row, v_feature)
        dnew = tl.dot((scores * scale).to(do.dtype), do)
        tl.store(dnew_ptr + rows[:, None] * DIM_V + v_feature[None, :], dnew)


@triton.jit
def _states_kernel(
    k_ptr,  # (B T, H / GROUP, K)
    k_stride,
    w_ptr,  # (B, H, N, C, K)
    new_ptr,  # (B, H, N, C, V): u, becomes n
    states_ptr,  # (B, H, N, K, V): before the chunks
    total_ptr,  # (B, H, N, C)
    ids_ptr,  # (B, N C), or None
    tokens,
    heads,
    chunks,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per head and block of the features of v, from chunk to chunk."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row, k_feature = tl.arange(0, CHUNK), tl.arange(0, DIM_K)
    v_feature = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ptr += batch * tokens * k_stride + head // GROUP * DIM_K
    if ids_ptr is not None:
        ids_ptr += batch * chunks * CHUNK
    state = tl.zeros((DIM_K, BLOCK_V), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        place = pair * chunks + chunk
        states = states_ptr + place * DIM_K * DIM_V
        tl.store(states + k_feature[:, None] * DIM_V + v_feature[None, :], state)
        rows = place * CHUNK + row
        w = tl.load(w_ptr + rows[:, None] * DIM_K + k_feature[None, :])
        new_place = rows[:, None] * DIM_V + v_feature[None, :]
        u = tl.load(new_ptr + new_place)
        new = u.to(tl.float32) - tl.dot(w, state.to(w.dtype))
        tl.store(new_ptr + new_place, new)
        token = chunk * CHUNK + row
        k = unit_tile(k_ptr, k_stride, token.to(tl.int64), token < tokens, k_feature, NORMALIZE)
        own_ids = ids_ptr if ids_ptr is None else ids_ptr + chunk * CHUNK
        _, end, whole = factors(  # pyright: ignore
            total_ptr + place * CHUNK, own_ids, chunk, CHUNK
        )
        state = state * whole + tl.dot(tl.trans(k), (new * end[:, None]).to(k.dtype))


@triton.jit
def _outputs_kernel(
    q_ptr,  # (B T, H / GROUP, K)
    q_stride,
    k_ptr,  # (B T, H / GROUP, K)
    k_stride,
    new_ptr,  # (B, H, N, C, V)
    states_ptr,  # (B, H, N, K, V)
    o_ptr,  # (B, T, H, V)
    total_ptr,  # (B, H, N, C)
    ids_ptr,  # (B, N C), or None
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
    key_head = head // GROUP * DIM_K
    q = unit_tile(q_ptr + first * q_stride + key_head, q_stride, row, is_row, k_feature, NORMALIZE)
    k = unit_tile(k_ptr + first * k_stride + key_head, k_stride, row, is_row, k_feature, NORMALIZE)
    scores = tl.dot(q, tl.trans(k)) * pair_decay(total_ptr, ids_ptr, row, row)
    scores = scores.to(q.dtype)
    start, _, _ = factors(total_ptr, ids_ptr, chunk, CHUNK)  # pyright: ignore
    for block in range(0, DIM_V, BLOCK_V):
        v_feature = block + tl.arange(0, BLOCK_V)
        states = states_ptr + place * DIM_K * DIM_V
        state = tl.load(states + k_feature[:, None] * DIM_V + v_feature[None, :])
        rows = place * CHUNK + row
        new = tl.load(new_ptr + rows[:, None] * DIM_V + v_feature[None, :])
        o = tl.dot(scores, new, tl.dot(q, state) * start[:, None]) * scale
        at = (first + row)[:, None] * heads * DIM_V + head * DIM_V + v_feature[None, :]
        tl.store(o_ptr + at, o, mask=is_row[:, None])


def gated_delta_rule(
    q: Tensor,  # (B T, H / groups, K)
    k: Tensor,  # (B T, H / groups, K)
    v: Tensor,  # (B T, H, V)
    g: Tensor,  # (B, T, H)
    beta: Tensor,  # (B, T, H)
    ids: Tensor | None,  # (B, N C) int32
    scale: float,
    normalize: bool,
    chunk: int,  # C
    o: Tensor,  # (B, T, H, V)
) -> None:
    """Write o. Features and heads of q, k and v are contiguous; all else is."""
    sizes = sizes_of(q, v, normalize, chunk)
    batch, tokens, heads = g.shape
    total, _, _, new, states = compute_states(q, k, v, None, g, beta, ids, scale, sizes)
    launch(
        _outputs_kernel,
        (batch * heads, total.shape[2]),
        *strided(q, k),
        *(new, states, o, total, ids, tokens, heads, scale),
        **sizes,
        BLOCK_V=min(STATE_BLOCK, sizes["DIM_V"]),
        num_warps=WARPS,
    )


def compute_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None,
    g: Tensor,
    beta: Tensor,
    ids: Tensor | None,
    scale: float,
    sizes: dict[str, int],
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None], Tensor, Tensor]:
    """Return G, T, w and the part of dn that is the chunks' own, n and the states before chunks."""
    (batch, tokens, heads), rows = g.shape, sizes["CHUNK"]
    chunks, dim_k, dim_v = -(-tokens // rows), q.shape[-1], v.shape[-1]
    total = g.new_empty(batch, heads, chunks, rows, dtype=torch.float32)
    inverse = q.new_empty(*total.shape, rows)
    w = q.new_empty(*total.shape, dim_k)
    new = q.new_empty(*total.shape, dim_v)
    dnew = None if do is None else torch.empty_like(new)
    states = q.new_empty(batch, heads, chunks, dim_k, dim_v)
    launch(
        _prepare_kernel,
        (batch * heads, chunks),
        *strided(q, k, v, do),
        *(g, beta, ids, total, inverse, w, new, dnew, tokens, heads, scale),
        **sizes,
        HALF=HALF,
        num_warps=WARPS,
    )
    block = min(STATE_BLOCK, dim_v)
    launch(
        _states_kernel,
        (batch * heads, dim_v // block),
        *strided(k),
        *(w, new, states, total, ids, tokens, heads, chunks),
        **sizes,
        BLOCK_V=block,
        STAGES=stages_of(q.device),
        num_warps=WARPS,
    )
    return total, inverse, (w, dnew), new, states


def sizes_of(q: Tensor, v: Tensor, normalize: bool, chunk: int) -> dict[str, int]:
    """Return what all kernels are compiled for."""
    dims = {"DIM_K": q.shape[-1], "DIM_V": v.shape[-1]}
    return dims | {"GROUP": v.shape[1] // q.shape[1], "CHUNK": chunk, "NORMALIZE": normalize}


def strided(*rows: Tensor | None) -> list[Tensor | int | None]:
    """Return matrices, each in front of the stride of its rows."""
    return [e for x in rows for e in (x, 0 if x is None else x.stride(0))]


def stages_of(device: torch.device) -> int:
    """Return of how many chunks a loop holds the tiles."""
    return 2 if shared_bytes(device) >= PIPELINED else 1
