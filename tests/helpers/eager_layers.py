"""Layers as Transformers' models compute them, and tables of angles."""

import torch
from layer_checks import ACTIVATIONS
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear, silu

EPS = 1e-5
MLP_SIZE = 40  # features inside a feed-forward layer
GATES = {"silu": silu, "sigmoid": torch.sigmoid}  # of norms


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + wide(weight))).type_as(x)


def normed(x: Tensor, group_size: int) -> Tensor:
    groups = x.unflatten(-1, (-1, group_size))
    return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + EPS)).flatten(-2)


def gate_behind(x: Tensor, gate: Tensor, weight: Tensor, size: int, activation: str) -> Tensor:
    """As Qwen3-Next has it."""
    scaled = weight * normed(wide(x), size).to(x.dtype)
    return (scaled * GATES[activation](wide(gate))).to(x.dtype)


def gate_in_front(x: Tensor, gate: Tensor, weight: Tensor, size: int, activation: str) -> Tensor:
    """As Mamba-2 has it."""
    return weight * normed(wide(x) * GATES[activation](wide(gate)), size).to(x.dtype)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    channels, width = weight.shape
    rows = nn.functional.pad(x.transpose(1, 2), (width - 1, 1))  # 1: PyTorch takes no rows of none
    y = conv1d(rows, weight[:, None], bias, groups=channels)[..., :-1].transpose(1, 2)
    return y if activation is None else ACTIVATIONS[activation](y)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str = "silu") -> Tensor:
    return linear(ACTIVATIONS[activation](linear(x, gate)) * linear(x, up), down)


def mlp_tensors(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Random x of this shape, and weights."""
    hidden_size = shape[-1]
    inside = (MLP_SIZE, hidden_size)
    sizes = {"x": shape, "gate": inside, "up": inside, "down": inside[::-1]}
    return {n: (torch.randn(size) / 2).to(device, dtype) for n, size in sizes.items()}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Transformers does it, partly too."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    across = torch.cat((-second, first), -1)
    return torch.cat((turned * cos[:, None] + across * sin[:, None], rest), -1)


def rotated_beside(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Cohere's and GLM's models do it, partly too: the pairs are neighbours."""
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (cos, sin))
    return torch.cat((turned * cos + across * sin, rest), -1)


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
