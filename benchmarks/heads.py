"""Define the heads that are measured, in the shapes of real models, and make batches for them.

N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Head:
    """The head of a model, and how it is trained.

    Attributes:
        name: model and what is special.
        hidden_size, vocab_size, tokens: H, V, N.
        frozen: whether the head's weight needs no gradient.
        ignored: share of labels that are ignored.
        softcap: of the model, None for none.
        peak: largest logit that is planted; the others spread by 1 around 0.
        mistaken: share of tokens whose planted logit is not their label's.
        zipf: whether the labels' frequency is 1 / rank, as of words in a text, rather than equal.
    """

    name: str
    hidden_size: int
    vocab_size: int
    tokens: int
    frozen: bool = False
    ignored: float = 0.0
    softcap: float | None = None
    peak: float = 10.0
    mistaken: float = 0.0
    zipf: bool = False


HEADS = (
    Head("Llama-3-8B", 4096, 128256, 8192),
    Head("Llama-3-8B, frozen", 4096, 128256, 8192, frozen=True),
    Head("Llama-3-8B, 70 % ignored", 4096, 128256, 8192, ignored=0.7),
    Head("Llama-3-8B, peaked logits", 4096, 128256, 8192, peak=40.0, mistaken=0.2),
    Head("Llama-3-8B, Zipf's labels", 4096, 128256, 8192, zipf=True),
    Head("Llama-3-8B, N 65536", 4096, 128256, 65536),
    Head("Gemma-2-2B", 2304, 256000, 8192, softcap=30.0),
    Head("Qwen3-0.6B", 1024, 151936, 16384),
    Head("Qwen3.5-0.8B", 1024, 248320, 16384),
    Head("Gemma-3-270M", 640, 262144, 16384),
)

SWEEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SWEEP = tuple(
    replace(head, tokens=tokens)
    for head in HEADS
    if head.name in ("Llama-3-8B", "Gemma-3-270M")
    for tokens in SWEEP_TOKENS
)

# as small batches of a small model, or a step whose host is late, call them
IDLE = (
    Head("Qwen3-0.6B", 1024, 151936, 512),
    Head("Qwen3-0.6B, frozen", 1024, 151936, 512, frozen=True),
    Head("Llama-3-8B", 4096, 128256, 512),
    Head("Llama-3-8B, frozen", 4096, 128256, 512, frozen=True),
    *(head for head in HEADS if head.name in ("Llama-3-8B", "Llama-3-8B, 70 % ignored")),
)


def batch(
    head: Head, *, device: torch.device | str = "cuda", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states (N, H) and weight (V, H) in bf16, and labels (N,).

    Each token's hidden state holds the direction of its label, or of another class where it is
    mistaken, times a number between 0 and the peak. So some of the tokens are predicted well.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = {"device": device, "generator": generator, "dtype": torch.float32}
    weight = torch.randn(head.vocab_size, head.hidden_size, **normal).mul_(head.hidden_size**-0.5)
    classes = torch.randint(head.vocab_size, (2, head.tokens), device=device, generator=generator)
    if head.zipf:
        # ranks whose logarithm is uniform; which class has which rank does not matter
        uniform = torch.rand(2, head.tokens, **normal)
        classes = (head.vocab_size**uniform).long().clamp_(max=head.vocab_size) - 1
    labels, others = classes
    planted = torch.where(torch.rand(head.tokens, **normal) < head.mistaken, others, labels)
    confidence = head.peak * torch.rand(head.tokens, 1, **normal)
    hidden_states = (
        torch.randn(head.tokens, head.hidden_size, **normal) + confidence * weight[planted]
    )
    ignored = torch.rand(head.tokens, **normal) < head.ignored
    return (
        hidden_states.bfloat16().requires_grad_(),
        weight.bfloat16().requires_grad_(not head.frozen),
        labels.masked_fill(ignored, IGNORE_INDEX),
    )
