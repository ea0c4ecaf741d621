"""Multiply a gradient in place by a factor that only the device knows; a factor of 1 is no pass."""

from torch import Tensor

from liger_patch.kernels.backend import serves_triton


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """``values *= factor`` for contiguous values of any shape and a factor of one element."""
    if serves_triton(values):
        from liger_patch.kernels import scale_triton

        return scale_triton.scale_(values, factor)
    if values.device.type == "cpu" and factor.item() == 1:
        return values
    return values.mul_(factor)
