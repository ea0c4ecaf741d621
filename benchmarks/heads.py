"""The heads that are measured: shapes of named models, and batches for them. N tokens, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Head:
    """One case: the head of a model, and how it is trained.

    Attributes:
        name: model and what is special.
        hidden_size, vocab_size, tokens: H, V, N.
        frozen: whether the head's weight needs no gradient.
        ignored: share of labels that are ignored.
        softcap: of the model, None for none.
    """

    name: str
    hidden_size: int
    vocab_size: int
    tokens: int
    frozen: bool = False
    ignored: float = 0.0
    softcap: float | None = None


HEADS = (
    Head("Llama-3-8B", 4096, 128256, 8192),
    Head("Llama-3-8B, frozen", 4096, 128256, 8192, frozen=True),
    Head("Llama-3-8B, 70 % ignored", 4096, 128256, 8192, ignored=0.7),
    Head("Gemma-2-2B", 2304, 256000, 8192, softcap=30.0),
    Head("Qwen3-0.6B", 1024, 151936, 16384),
    Head("Gemma-3-270M", 640, 262144, 16384),
)


def batch(head: Head, *, device: str = "cuda", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states (N, H) and weight (V, H) in bf16, and labels (N,).

    The labels' directions are planted in the hidden states, so that a part of the tokens is
    predicted well.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = {"device": device, "generator": generator, "dtype": torch.float32}
    weight = torch.randn(head.vocab_size, head.hidden_size, **normal).mul_(head.hidden_size**-0.5)
    labels = torch.randint(head.vocab_size, (head.tokens,), device=device, generator=generator)
    confidence = 10.0 * torch.rand(head.tokens, 1, **normal)
    hidden_states = (
        torch.randn(head.tokens, head.hidden_size, **normal) + confidence * weight[labels]
    )
    ignored = torch.rand(head.tokens, **normal) < head.ignored
    return (
        hidden_states.bfloat16().requires_grad_(),
        weight.bfloat16().requires_grad_(not head.frozen),
        labels.masked_fill(ignored, IGNORE_INDEX),
    )
