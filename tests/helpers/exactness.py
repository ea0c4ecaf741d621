"""The one rule for errors: no worse than eager PyTorch in the same dtype, both measured against
float64.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute difference from the float64 truth."""
    assert value.shape == truth.shape
    if not truth.numel():
        return 0.0
    return (value.detach().double() - truth.to(value.device)).abs().max().item()


def assert_no_worse(
    ours: Mapping[str, Tensor | None],
    eager: Mapping[str, Tensor | None],
    truth: Mapping[str, Tensor | None],
    dtype: torch.dtype,
    *,
    eps: int = 1,
) -> None:
    """Loss and gradients, by name: each within twice eager's own error plus one eps of the largest
    true value. More than one for a single number: eager's may be exact by luck.

    A gradient that is missing must be missing everywhere. nan is never within anything.
    """
    assert ours.keys() == eager.keys() == truth.keys()
    for name, expected in truth.items():
        ours_value, eager_value = ours[name], eager[name]
        if expected is None or ours_value is None or eager_value is None:
            assert ours_value is eager_value is expected, name  # None, all three
            continue
        largest = expected.abs().max().item() if expected.numel() else 0.0
        allowed = 2 * error(eager_value, expected) + eps * torch.finfo(dtype).eps * largest
        off = error(ours_value, expected)
        assert off <= allowed, (
            f"{name}: off by {off:.3g}, eager by {error(eager_value, expected):.3g}, "
            f"allowed {allowed:.3g}"
        )


def assert_same_bits(
    ours: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> None:
    """A gradient that is missing must be missing in both."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        found = ours[name]
        if value is None or found is None:
            assert found is value, name
        else:
            assert torch.equal(found, value), name
