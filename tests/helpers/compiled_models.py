"""Models of one layer for ``torch.compile``, their steps, and the graphs that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_models import ROWS, Batch, tiny_batch, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_patch import apply_patch
from liger_patch.deferred.tensor import DeferredLogits

IGNORED = (0.0, 0.3, 0.9, 1.0)  # shares of the labels


def make_model(model_type: str = "llama", *, patch: bool = True) -> PreTrainedModel:
    """Return a model in float64 with one layer, for the sake of the compiler's time."""
    model = tiny_model(ROWS[model_type]).double()
    del model.model.layers[1:]
    return apply_patch(model) if patch else model


def batch_of(model: nn.Module, seed: int = 0, ignored: float = 0.3) -> Batch:
    batch = tiny_batch(model, seed=seed, ignored=ignored)
    if ignored == 1.0:
        batch["labels"].fill_(-100)
    return batch


def is_deferred(logits: Tensor) -> bool:
    """Return whether logits have no values yet."""
    return isinstance(logits, DeferredLogits) and not logits.is_computed


def run(
    model: nn.Module, batch: Batch, call: Callable[..., Any] | None = None
) -> dict[str, Tensor | None]:
    """Return loss and gradients of `call`, which is `model` compiled, or of `model`."""
    model.zero_grad()
    loss = (model if call is None else call)(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}
