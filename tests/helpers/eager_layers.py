"""Norms and rotary embeddings as Transformers' models compute them, and tables of angles."""

import torch
from torch import Tensor

EPS = 1e-5


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + wide(weight))).type_as(x)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Transformers does it, partly too."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    across = torch.cat((-second, first), -1)
    return torch.cat((turned * cos[:, None] + across * sin[:, None], rest), -1)


def tables(shape: tuple[int, ...], kind: str) -> tuple[Tensor, Tensor]:
    """cos and sin of positions that restart, come in no order, or are shared by all sequences."""
    batch, tokens, size = shape
    positions = torch.arange(tokens).expand(batch, -1)
    if kind == "packed":
        positions = positions % 3
    if kind == "any order":
        positions = torch.stack([torch.randperm(tokens) for _ in range(batch)])
    if kind == "shared":
        positions = positions[:1]
    frequencies = 1.0 / 100 ** (torch.arange(0, size, 2) / size)
    angles = positions[..., None] * frequencies
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()
