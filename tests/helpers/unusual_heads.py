"""Output embeddings of other kinds than ``nn.Linear`` with a plain weight, as libraries make them.

Each function changes a head in place, or returns another.
"""

from __future__ import annotations

import torch
from tiny_models import VOCAB_SIZE as V
from torch import Tensor, nn
from torch.nn.functional import linear

H = 32  # of the tiny models


class CastOutput(nn.Sequential):
    """As recipes for training in 8 bits wrap the head."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


class Packed(nn.Module):
    """As GPTQ's and AWQ's layers are: two 4-bit numbers a byte, scales, and no ``weight``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scales = weight.abs().amax(1, keepdim=True) / 7
        numbers = ((weight / scales).round() + 8).to(torch.uint8)
        self.register_buffer("qweight", numbers[:, ::2] | (numbers[:, 1::2] << 4))
        self.register_buffer("scales", scales)

    def forward(self, hidden_states: Tensor) -> Tensor:
        numbers = torch.stack([self.qweight & 15, self.qweight >> 4], dim=-1).flatten(1)
        return hidden_states @ ((numbers.to(hidden_states.dtype) - 8) * self.scales).T


class Upcasting(nn.Linear):
    """Stored in few bits, computed in those of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight.to(input.dtype))


class Sharded(Tensor):
    """As DTensor is: what is computed from it is of its class."""


def float8(head: nn.Linear) -> None:
    head.__class__ = Upcasting
    weight = head.weight.detach().to(torch.float8_e4m3fn)
    head.weight = nn.Parameter(weight, requires_grad=False)


def sharded(head: nn.Linear) -> None:
    head.weight = nn.Parameter(head.weight.detach().as_subclass(Sharded))


def two_layers(head: nn.Linear) -> nn.Module:
    return nn.Sequential(nn.Linear(H, 16), nn.Linear(16, V))


def packed(head: nn.Linear) -> nn.Module:
    return Packed(head.weight.detach())
