"""Ways to compute the loss of a head: ours at several budgets, and the peers that are installed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from heads import Head
from peers import Loss, peers
from torch import Tensor

from liger_patch import linear_cross_entropy

BUDGETS_MIB = (512, 128)


def contenders(head: Head) -> dict[str, Loss]:
    """Name to loss, eager first."""

    def eager(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden_states, weight)
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return torch.nn.functional.cross_entropy(logits.float(), labels)

    def ours(budget: int) -> Loss:
        return lambda hidden_states, weight, labels: linear_cross_entropy(
            hidden_states, weight, labels, softcap=head.softcap, chunk_mib=budget
        )

    return {
        "eager": eager,
        "torch.compile": torch.compile(eager),
        **peers(head),
        **{f"liger_patch {budget} MiB": ours(budget) for budget in BUDGETS_MIB},
    }


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
        x = hidden_states[labels >= 0].contiguous()
        logits = torch.randn(len(x), head.vocab_size, device=x.device).to(x.dtype)
        dx, dw = torch.empty_like(x), torch.empty_like(weight)

    @torch.no_grad()
    def products() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        if not head.frozen:
            torch.mm(logits.t(), x, out=dw)

    return products
