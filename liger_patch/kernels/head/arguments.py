"""The arguments of the operators on a head: checked, and in which dtype and chunks they compute.

N: tokens, H: hidden size, V: vocabulary, R: rank.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from liger_patch.kernels.autocast import autocast_dtype
from liger_patch.kernels.backend import check_is_plain
from liger_patch.kernels.head.chunks import MIB, default_chunk_mib
from liger_patch.kernels.head.inputs import HeadInputs, QuantizedWeight

MAX_CHUNK_MIB = 2**40  # no device has so much


def checked_inputs(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor | QuantizedWeight,  # (V, H)
    bias: Tensor | None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None,  # (N, R), (V, R)
) -> HeadInputs:
    """The inputs of a head; ValueError unless they fit each other."""
    if not isinstance(weight, Tensor) and not hasattr(weight, "rows"):
        raise ValueError(
            f"weight must be a tensor or a QuantizedWeight, got {type(weight).__name__}"
        )
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states must have shape (N, H), got {tuple(hidden_states.shape)}")
    hidden_size = hidden_states.shape[1]
    if len(weight.shape) != 2 or weight.shape[1] != hidden_size or not weight.shape[0]:
        raise ValueError(f"weight must have shape (V, {hidden_size}), got {tuple(weight.shape)}")
    vocab_size, device = weight.shape[0], hidden_states.device
    if bias is not None and tuple(bias.shape) != (vocab_size,):
        raise ValueError(f"bias must have shape ({vocab_size},), got {tuple(bias.shape)}")
    low_rank_states, low_rank_weight = _checked_low_rank(low_rank, len(hidden_states), vocab_size)
    inputs = HeadInputs(hidden_states, weight, bias, low_rank_states, low_rank_weight)
    for name, tensor in inputs._asdict().items():
        if isinstance(tensor, Tensor):
            check_is_plain(name, tensor)
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on {device} as hidden_states are, got {tensor.device}"
            )
    return inputs


def checked_chunk_bytes(chunk_mib: float | None, *, trains_weight: bool) -> int:
    """Bytes of logits held at once; ValueError unless ``chunk_mib`` is a size or None."""
    is_number = isinstance(chunk_mib, Real) and not isinstance(chunk_mib, bool)
    if chunk_mib is not None and not (is_number and 0 < chunk_mib < math.inf):
        raise ValueError(f"chunk_mib must be a finite number of MiB > 0 or None, got {chunk_mib!r}")
    return int(min(chunk_mib or default_chunk_mib(trains_weight), MAX_CHUNK_MIB) * MIB)


def _checked_low_rank(
    low_rank: tuple[Tensor, Tensor] | None, tokens: int, vocab_size: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if low_rank is None:
        return None, None
    if not (
        isinstance(low_rank, (tuple, list))
        and len(low_rank) == 2
        and all(isinstance(each, Tensor) for each in low_rank)
    ):
        raise ValueError(f"low_rank must be two tensors, (N, R) and (V, R), got {low_rank!r:.80}")
    states, weight = low_rank
    if states.dim() != 2 or len(states) != tokens or not states.shape[1]:
        raise ValueError(f"low_rank[0] must have shape ({tokens}, R), got {tuple(states.shape)}")
    if tuple(weight.shape) != (vocab_size, states.shape[1]):
        raise ValueError(
            f"low_rank[1] must have shape ({vocab_size}, {states.shape[1]}), "
            f"got {tuple(weight.shape)}"
        )
    for i, tensor in enumerate(low_rank):
        if not tensor.is_floating_point():
            raise ValueError(f"low_rank[{i}] must be a floating-point tensor, got {tensor.dtype}")
    return states, weight


def product_dtype(inputs: HeadInputs) -> torch.dtype:
    """The dtype that ``torch.nn.functional.linear`` would compute in, now."""
    dtypes = {"hidden_states": inputs.hidden_states.dtype, "weight": inputs.weight.dtype}
    if inputs.bias is not None:
        dtypes["bias"] = inputs.bias.dtype
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating-point tensor, got {dtype}")
    dtype = autocast_dtype(inputs.hidden_states.device.type)
    if dtype is not None and torch.float64 not in dtypes.values():
        return dtype
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {dtypes}"
        )
    return inputs.hidden_states.dtype
