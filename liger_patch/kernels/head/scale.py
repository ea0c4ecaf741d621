"""Multiply gradients in place by a factor that only the device knows; a factor of 1 is no pass."""

from collections.abc import Sequence

from torch import Tensor

from liger_patch.kernels.backend import serves_triton


def scale_(values: Sequence[Tensor], factor: Tensor) -> None:
    """Each of ``values *= factor``: contiguous, of any shape; a factor of one element."""
    if values and serves_triton(*values):
        from liger_patch.kernels.triton import scale as scale_triton

        scale_triton.scale_(values, factor)
    elif factor.device.type != "cpu" or factor.item() != 1:
        for each in values:
            each.mul_(factor)
