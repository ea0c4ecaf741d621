"""What the autograd functions of this package say of derivatives they do not have."""

import torch

LOSS_ADVICE = "Use torch.nn.functional.cross_entropy on logits of your own for that."
LAYER_ADVICE = "Use apply_patch(model, layers=False) for that."


def refuse_second_derivative(name: str, advice: str = LOSS_ADVICE) -> None:
    """Raise RuntimeError in a backward pass that is itself recorded (``create_graph=True``)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative: backward with create_graph=True is not supported. "
            f"{advice}"
        )
