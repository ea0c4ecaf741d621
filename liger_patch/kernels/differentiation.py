"""What the autograd functions of this package say of derivatives they do not have."""

from typing import Any, cast

import torch
from torch import Tensor

LOSS_ADVICE = "Use torch.nn.functional.cross_entropy on logits of your own for that."
LAYER_ADVICE = "Use apply_patch(model, layers=False) for that."
_BATCHED = cast(Any, torch._C)._parse_dispatch_key("Batched")


def check_backward(name: str, *upstream: Tensor | None, advice: str = LOSS_ADVICE) -> None:
    """Raise RuntimeError in a backward pass that is itself recorded (``create_graph=True``), or
    whose upstream gradients are a batch (``is_grads_batched=True``).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative: backward with create_graph=True is not supported. "
            f"{advice}"
        )
    if torch.compiler.is_compiling():  # which batches nothing, and traces no keys
        return
    if any(each is not None and torch._C._dispatch_keys(each).has(_BATCHED) for each in upstream):
        raise RuntimeError(
            f"{name} takes one upstream gradient at a time: is_grads_batched=True is not "
            f"supported. {advice}"
        )
