"""Tensor descriptors of Triton: tiles of a matrix that the tensor memory accelerator of a GPU, from
Hopper on, loads and stores.
"""

import functools

import torch

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton < 3.4
    TensorDescriptor = None

HOPPER = (9, 0)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return True for an H100, H200 or another GPU of their kind."""
    return _compute_capability(device) == HOPPER


@functools.cache
def takes_descriptors(device: torch.device) -> bool:
    """Return True if kernels on a device can be given descriptors."""
    return TensorDescriptor is not None and _compute_capability(device) >= HOPPER


def _compute_capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
