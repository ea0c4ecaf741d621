"""Which form of a kernel serves a tensor: Triton where it runs, PyTorch operations elsewhere."""

import functools
import importlib.util
import os

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

HAS_TRITON = importlib.util.find_spec("triton") is not None
LEAST_SHARED_BYTES = 64 * 1024  # of a program: sm_75's and gfx942's
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # computed in float32 inside


def serves_triton(*tensors: Tensor | None) -> bool:
    """Return True if the Triton kernels serve these tensors: their devices and floating dtypes."""
    return all(
        each.dtype in TRITON_DTYPES and serves_triton_device(each)
        for each in tensors
        if each is not None
    )


def check_is_plain(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that holds others instead of numbers (DTensor)."""
    if is_traceable_wrapper_subclass(tensor):
        raise ValueError(
            f"{name} must be a plain tensor, got {type(tensor).__name__}: pass its local or its "
            "full tensor"
        )


def serves_triton_device(tensor: Tensor) -> bool:
    """Return True if Triton runs where this tensor is: on a GPU (CUDA or ROCm).

    A tensor of a subclass may have no memory of its own (DTensor), and is left to PyTorch. Under
    TRITON_INTERPRET=1, Triton's own switch, CPU tensors are served too: by Triton's interpreter,
    for tests.
    """
    if not HAS_TRITON or type(tensor) not in (Tensor, Parameter):
        return False
    return tensor.is_cuda or (
        tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device that runs Triton's kernels."""
    if device.type == "cpu":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on a device that runs Triton's kernels."""
    if device.type == "cpu":  # Triton's interpreter
        return LEAST_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)
