"""Arguments of gated delta rules, and what Transformers' models compute of them."""

import torch
import truths
from torch import Tensor
from torch.nn.functional import normalize

from liger_patch.kernels.delta_rule import CHUNK


def inputs(
    tokens: int,
    *,
    batch: int = 2,
    heads: int = 2,
    groups: int = 2,
    dims: tuple[int, int] = (16, 32),
) -> dict[str, Tensor]:
    """Of normalized keys, as the layers have them; groups: heads of v for one of q and k."""
    dim_k, dim_v = dims
    shape = batch, tokens, heads * groups
    return {
        "q": normalize(torch.randn(batch, tokens, heads, dim_k), dim=-1),
        "k": normalize(torch.randn(batch, tokens, heads, dim_k), dim=-1),
        "v": torch.randn(*shape, dim_v),
        "g": -torch.rand(shape) * 0.3,
        "beta": torch.rand(shape),
    }


def eager(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence_ids: Tensor | None = None
) -> Tensor:
    """In float64 the recurrence, the truth; else chunk by chunk in float32, rounded once."""
    if v.dtype == torch.float64:
        return truths.gated_delta_rule(q, k, v, g, beta, sequence_ids)
    if sequence_ids is not None:
        return torch.cat(
            [_sequences(*row) for row in zip(q, k, v, g, beta, sequence_ids, strict=True)]
        )
    # the first is of no tokens
    outputs = [(v[:, :0] * (q * k)[:, :0, :1, :1] * (g * beta)[:, :0, :, None]).to(q.dtype)]
    seen = torch.ones(v.shape[1], v.shape[1], dtype=torch.bool, device=v.device).tril()
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], 2) for each in (q, k))
    state = v.new_zeros(len(v), v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    wide = (each.float().transpose(1, 2).split(CHUNK, 2) for each in (q, k, v, g, beta))
    for chunk in zip(*wide, strict=True) if v.shape[1] else ():
        q, k, v, g, beta = chunk
        total, beta = g.cumsum(-1)[..., None], beta[..., None]
        is_seen = seen[: v.shape[2], : v.shape[2]]
        decay = (total - total.mT).masked_fill(~is_seen, -torch.inf).exp()
        new = beta * (v - total.exp() * k @ state)
        new = torch.linalg.solve_triangular(
            beta * (k @ k.mT) * decay, new, upper=False, unitriangular=True
        )
        o = total.exp() * q @ state + (q @ k.mT * decay) @ new
        outputs.append((o * q.shape[-1] ** -0.5).transpose(1, 2).to(outputs[0].dtype))
        last = total[..., -1:, :]
        state = last.exp() * state + ((last - total).exp() * k).mT @ new
    return torch.cat(outputs, 1)


def _sequences(*row: Tensor) -> Tensor:
    """The sequences of one row, each by itself: (1, T, H, V)."""
    *tensors, ids = row
    lengths = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
    parts = zip(*(each[None].split(lengths, 1) for each in tensors), strict=True)
    return torch.cat([eager(*part) for part in parts], 1)
