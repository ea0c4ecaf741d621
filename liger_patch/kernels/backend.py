"""Questions that every operator asks: whether Triton kernels or PyTorch operations serve a tensor,
in which dtype, whether a GPU loads tiles by tensor descriptors (its tensor memory accelerator does,
from Hopper on), and whether autograd can run its backward pass. And memory for results in the order
of their input (..., H): a transposed view (attention heads in front of tokens) needs no copy.
"""

import functools
import importlib.util
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton < 3.4
    TensorDescriptor = None

HAS_TRITON = importlib.util.find_spec("triton") is not None
LEAST_SHARED_BYTES = 64 * 1024  # of a program: sm_75's and gfx942's
# TRITON_INTERPRET is Triton's own switch: its interpreter runs on the CPU, for tests
TRITON_DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # computed in float32 inside
PLAIN_TENSORS = (Tensor, Parameter)
HOPPER = (9, 0)
LOSS_ADVICE = "Use torch.nn.functional.cross_entropy on logits of your own for that."
LAYER_ADVICE = "Use apply_patch(model, layers=False) for that."
_BATCHED = cast(Any, torch._C)._parse_dispatch_key("Batched")


def serves_triton(*tensors: Tensor | None) -> bool:
    """Return True if the Triton kernels serve these tensors: their floating dtypes and their one
    device. PyTorch's operations serve the others, or name what does not fit.
    """
    device = None
    for each in tensors:
        if each is None:
            continue
        if each.dtype not in TRITON_DTYPES or type(each) not in PLAIN_TENSORS:
            return False
        if device not in (None, each.device):
            return False
        device = each.device
    return HAS_TRITON and device is not None and device.type in TRITON_DEVICES


def serves_triton_device(tensor: Tensor) -> bool:
    """Return True if Triton runs where this tensor is: on a GPU (CUDA or ROCm).

    A tensor of a subclass may have no memory of its own (DTensor), and is left to PyTorch.
    """
    return HAS_TRITON and type(tensor) in PLAIN_TENSORS and tensor.device.type in TRITON_DEVICES


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


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device that runs Triton's kernels."""
    if device.type == "cpu":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can have on a device."""
    if device.type == "cpu":  # Triton's interpreter
        return LEAST_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels compute in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a truth for results in ``dtype``: that of float64 is float64."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else torch.float64


def autocast_dtype(device_type: str, operand: torch.dtype | None = None) -> torch.dtype | None:
    """Return the dtype that autocast computes products in now, None where it is off, and for
    operands of float64, which it does not cast.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has none
        return None
    if operand == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return a context within which autocast computes products in this dtype; None for no autocast.

    It does nothing where that is so already: torch.export records the states of autocast that a
    call sets, and keeps unused products of another state.
    """
    if autocast_dtype(device_type) == dtype:
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context within which products keep the dtype of their operands."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def check_plain_tensors(**arguments: object) -> None:
    """Raise ValueError for an argument that is no dense tensor, or of a subclass that holds other
    tensors (DTensor). Optional ones may be None: ``bias``, weights of classes, tokens, rows.
    """
    for name, value in arguments.items():
        if value is None and name in ("bias", "class_weight", "token_weight", "row_weights"):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        if is_traceable_wrapper_subclass(value):
            raise ValueError(
                f"{name} must be a plain tensor, got {type(value).__name__}: pass its local or its "
                "full tensor"
            )
        if value.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}")


def check_backward(name: str, *upstream: Tensor | None, advice: str = LOSS_ADVICE) -> None:
    """Raise RuntimeError in a backward pass that is itself recorded (``create_graph=True``), or
    whose upstream gradients are a batch (``is_grads_batched=True``).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative: backward with create_graph=True is not supported. "
            f"{advice}"
        )
    if torch.compiler.is_compiling():  # it batches nothing, and cannot trace dispatch keys
        return
    for each in upstream:
        if each is not None and torch._C._dispatch_keys(each).has(_BATCHED):
            raise RuntimeError(
                f"{name} takes one upstream gradient at a time: is_grads_batched=True is not "
                f"supported. {advice}"
            )


def rows_of(tensor: Tensor) -> Tensor:
    """Return (..., H) as (N, H), also where H is 0."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def contiguous_features(tensor: Tensor) -> Tensor:
    """Return the tensor, copied where its last dimension has another stride than 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, copied unless it is contiguous; or None if there is none."""
    return None if tensor is None else tensor.contiguous()


def empty_in_order(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return dense memory for a result of the tensor's shape, rows in the tensor's order;
    contiguous where the tensor's last dimension is not. Strides of dimensions of size 1 say
    nothing.
    """
    if tensor.is_contiguous() or tensor.stride(-1) != 1:
        return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    like = torch.empty_like(tensor, dtype=dtype)
    if like.stride() == tensor.stride():
        return like
    # torch.preserve_format takes rows apart where another dimension has a stride of 1 too
    strides, step = [1] * tensor.dim(), tensor.shape[-1]
    for d in sorted(reversed(range(tensor.dim() - 1)), key=tensor.stride):
        strides[d], step = step, step * tensor.shape[d]
    # no view: what an autograd function returns is not to be written to where it is one
    return tensor.new_empty_strided(tensor.shape, strides, dtype=dtype)


def in_order_of(result: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the order in memory of a dense result of its shape."""
    if tensor.stride() == result.stride():
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), result.stride(), strict=True)
    if all(size == 1 or ours == theirs for size, ours, theirs in sizes):
        return tensor
    return torch.empty_like(result, dtype=tensor.dtype).copy_(tensor)
