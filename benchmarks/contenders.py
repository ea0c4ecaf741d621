"""Ways to compute the loss of a head: plain PyTorch, peers, ours at several budgets, the floor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from heads import IGNORE_INDEX, Head
from peers import Loss, peers
from torch import Tensor

from liger_patch import linear_cross_entropy

OURS = "liger_patch"  # how the names of all of ours begin
BUDGETS_MIB = (1024, 768, 128)  # beside the default


def contenders(head: Head, *, compiled: bool = True) -> dict[str, Loss]:
    """Name to loss, eager first."""
    losses = {"eager": eager(head)}
    if compiled:
        # Each head has its own graph, and at most eight are kept of one function; static shapes,
        # because the check on fewer tokens would otherwise make the measured graph a general one.
        torch.compiler.reset()
        losses["torch.compile"] = torch.compile(eager(head), dynamic=False)
    return {
        **losses,
        **peers(head),
        OURS: ours(head),
        **{f"{OURS} {budget} MiB": ours(head, chunk_mib=budget) for budget in BUDGETS_MIB},
    }


def sweep_contenders(head: Head) -> dict[str, Loss]:
    """Few of them: without torch.compile, which compiles again for each number of tokens."""
    kept = ("eager", "Liger-Kernel", OURS)
    return {name: f for name, f in contenders(head, compiled=False).items() if name in kept}


def eager(head: Head) -> Loss:
    """What Transformers' models do: logits, then their cross entropy in at least float32."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden_states, weight)
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)

    return loss


def ours(head: Head, **options: Any) -> Loss:
    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden_states,
            weight,
            labels,
            ignore_index=IGNORE_INDEX,
            softcap=head.softcap,
            **options,
        )

    return loss


def step(loss: Loss, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: loss, and the gradients of what needs them."""
    value = loss(hidden_states, weight, labels)
    return value, *torch.autograd.grad(
        value, [t for t in (hidden_states, weight) if t.requires_grad]
    )


def bare_products(
    head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor
) -> Callable[[], None]:
    """The floor: the matrix products alone, over the supervised tokens, into ready memory."""
    with torch.no_grad():
        x = hidden_states[labels != IGNORE_INDEX].contiguous()
        logits = x.new_empty(len(x), head.vocab_size)
        dx, dw = torch.empty_like(x), None if head.frozen else torch.empty_like(weight)

    @torch.no_grad()
    def products() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        if dw is not None:
            torch.mm(logits.t(), x, out=dw)

    return products
