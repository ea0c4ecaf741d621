"""Define the layers whose kernels are measured: the sizes of real models, in bf16.

Each case has its inputs, the number of bytes that a kernel must read and write, each once, and the
contenders' functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from liger_patch.kernels.gated import run_gated
from liger_patch.kernels.rms_norm import run_rms_norm
from liger_patch.kernels.rotary import rotary

from .batches_of_calls import Inputs

EPS = 1e-6
ELEMENT = 2  # bytes: bf16
STATISTIC = 4  # bytes: float32, one a row


@dataclass(frozen=True)
class Norm:
    """RMSNorm of one layer, or of queries and keys: rows are tokens, or heads of tokens."""

    model: str
    rows: int
    hidden_size: int
    offset: float = 0.0

    @property
    def name(self) -> str:
        return f"rms_norm {self.rows} x {self.hidden_size}, {self.model}"

    def inputs(self, device: torch.device | str) -> Inputs:
        x, dy = (_randn(self.rows, self.hidden_size, device=device) for _ in range(2))
        return Inputs((x, _randn(self.hidden_size, device=device)), (), (dy,))

    def forward_bytes(self) -> int:
        """Count reads of x and weight, writes of y and the rows' statistics."""
        return ELEMENT * (2 * self.rows + 1) * self.hidden_size + STATISTIC * self.rows

    def backward_bytes(self) -> int:
        """Count reads of dy, x, weight and the rows' statistics, writes of dx and dweight."""
        return ELEMENT * (3 * self.rows + 2) * self.hidden_size + STATISTIC * self.rows

    def eager(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute as Transformers' models do: Llama's rounds in front of the weight."""
        wide = _wide(x)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        if self.offset:
            return (normed * (self.offset + _wide(weight))).type_as(x)
        return weight * normed.to(x.dtype)

    def liger(self, x: Tensor, weight: Tensor) -> Tensor:
        """Call it with the options that it gives the models: for Gemma, not in place."""
        casting_mode = "gemma" if self.offset else "llama"
        in_place = not self.offset
        return _liger().liger_rms_norm(x, weight, EPS, self.offset, casting_mode, in_place)

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        return run_rms_norm(x, weight, EPS, self.offset, x.dtype)


@dataclass(frozen=True)
class Gate:
    """The gated activation of a feed-forward layer."""

    model: str
    tokens: int
    size: int
    activation: str

    @property
    def name(self) -> str:
        return f"gated {self.activation} {self.tokens} x {self.size}, {self.model}"

    def inputs(self, device: torch.device | str) -> Inputs:
        gate, up, dy = (_randn(self.tokens, self.size, device=device) for _ in range(3))
        return Inputs((gate, up), (), (dy,))

    def forward_bytes(self) -> int:
        """Count reads of gate and up, writes of y."""
        return ELEMENT * 3 * self.tokens * self.size

    def backward_bytes(self) -> int:
        """Count reads of dy, gate and up, writes of dgate and dup."""
        return ELEMENT * 5 * self.tokens * self.size

    def eager(self, gate: Tensor, up: Tensor) -> Tensor:
        activated = silu(gate) if self.activation == "silu" else gelu(gate, approximate="tanh")
        return activated * up

    def liger(self, gate: Tensor, up: Tensor) -> Tensor:
        module = _liger()
        return (module.liger_swiglu if self.activation == "silu" else module.liger_geglu)(gate, up)

    def ours(self, gate: Tensor, up: Tensor) -> Tensor:
        return run_gated(gate, up, self.activation)


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of the queries and keys of one layer.

    Attributes:
        turned: features of a head that are turned, None for all.
    """

    model: str
    batch: int
    heads: int
    key_heads: int
    tokens: int
    size: int
    turned: int | None = None

    @property
    def name(self) -> str:
        part = f"{self.turned} of {self.size}" if self.turned else f"{self.size}"
        heads = f"({self.heads} + {self.key_heads})"
        return f"rotary {self.batch} x {heads} x {self.tokens} x {part}, {self.model}"

    def inputs(self, device: torch.device | str) -> Inputs:
        """Return tensors with tokens in front of heads in memory; sequences share the angles."""

        def made(heads: int) -> Tensor:
            return _randn(self.batch, self.tokens, heads, self.size, device=device).transpose(1, 2)

        turned = self.turned or self.size
        frequencies = 10000.0 ** (-torch.arange(0, turned, 2, device=device) / turned)
        angles = torch.arange(self.tokens, device=device)[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)[None]
        tables = angles.cos().bfloat16(), angles.sin().bfloat16()
        queries_and_keys = (self.heads, self.key_heads)
        q, k = (made(heads) for heads in queries_and_keys)
        dq, dk = (made(heads) for heads in queries_and_keys)
        return Inputs((q, k), tables, (dq, dk))

    def forward_bytes(self) -> int:
        """Count reads of q, k, cos and sin, writes of the turned q and k."""
        heads = self.batch * (self.heads + self.key_heads) * self.size
        return ELEMENT * self.tokens * (2 * heads + 2 * (self.turned or self.size))

    def backward_bytes(self) -> int:
        """Count the same: gradients have the shapes of queries and keys."""
        return self.forward_bytes()

    def eager(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(_rotated(each, cos[:, None], sin[:, None]) for each in (q, k))

    def liger(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return _liger().liger_rope(q, k, cos, sin)

    def ours(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return rotary(q, k, cos, sin)


Case = Norm | Gate | Rotation

CASES: tuple[Case, ...] = (
    Norm("Llama-3.2-1B", 16384, 2048),
    Norm("Qwen3-8B", 8192, 4096),
    Norm("Qwen3-14B", 8192, 5120),
    Norm("Gemma-2-2B", 8192, 2304, offset=1.0),
    Norm("Gemma-3-270M", 16384, 640, offset=1.0),
    Norm("heads of Qwen3-0.6B", 16384 * (16 + 8), 128),
    Norm("heads of Gemma-3-270M", 16384 * (4 + 1), 256, offset=1.0),
    Gate("Llama-3.2-1B", 16384, 8192, "silu"),
    Gate("Qwen3-8B", 8192, 12288, "silu"),
    Gate("Gemma-2-2B", 8192, 9216, "gelu_tanh"),
    Gate("Gemma-3-270M", 16384, 2048, "gelu_tanh"),
    Rotation("Llama-3.2-1B", 8, 32, 8, 2048, 64),
    Rotation("Qwen3-8B", 4, 32, 8, 2048, 128),
    Rotation("Gemma-3-270M", 8, 4, 1, 2048, 256),
    Rotation("Qwen3-Next-80B-A3B", 8, 16, 2, 2048, 256, turned=64),
)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn all features or the first ones, as Transformers' models do."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((_rotated(x[..., :turned], cos, sin), x[..., turned:]), -1)
    first, second = x[..., : turned // 2], x[..., turned // 2 :]
    return x * cos + torch.cat((-second, first), -1) * sin


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _randn(*shape: int, device: torch.device | str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _liger():
    return import_module("liger_kernel.transformers.functional")
