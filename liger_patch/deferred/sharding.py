"""Heads whose weight is sharded over a process group: whether it is still there when the loss is
computed, and which parameter the optimizer changes.

FSDP2 (``fully_shard``) and DeepSpeed's ZeRO-3 gather the whole weight for the head's call. A head
whose weight is freed afterwards cannot be fused. Neither engine has a public API to ask: attributes
of torch 2.6 to 2.13 and of DeepSpeed 0.19 are read, and where they are missing, the weight counts
as freed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_shards: Any = WeakIdKeyDictionary()  # gathered weights -> their shards, None for none


def why_weight_is_freed(head: nn.Module) -> str | None:
    """Return why the head's weight is gone when the loss is computed; None where it stays.

    A unit of ``fully_shard`` with ``reshard_after_forward=False``, as accelerate's and
    Transformers' own for the last norm and the head, keeps its weight until the backward pass.
    """
    classes = {cls.__name__ for cls in type(head).__mro__}
    if "FullyShardedDataParallel" in classes:
        return "FSDP shards the head on its own and frees its weight before the loss"
    if "FSDPModule" in classes and _reshards_after_forward(head):
        return (
            "FSDP shards the head on its own and frees its weight before the loss: use "
            "reshard_after_forward=False for the unit that holds the head"
        )
    if any(hasattr(p, "ds_id") for p in head.parameters()):
        return "DeepSpeed ZeRO-3 frees the head's weight before the loss"
    return None


def _reshards_after_forward(head: Any) -> bool:
    groups = _groups(head._get_fsdp_state())
    return not groups or any(getattr(group, "_reshard_after_forward", True) for group in groups)


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit of ``fully_shard``."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions have one
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def stored_parameter(weight: Tensor, model: nn.Module) -> Tensor:
    """Return the parameter that the optimizer changes: the shard of a weight that ``fully_shard``
    has gathered, else the weight itself.
    """
    # the walk over all modules takes milliseconds, and finds the same each time
    if weight not in _shards:
        _shards[weight] = _shard_of(weight, model)
    shard = _shards[weight]
    return weight if shard is None else shard


def _shard_of(weight: Tensor, model: nn.Module) -> Tensor | None:
    unit: Any = next((m for m in model.modules() if hasattr(type(m), "_get_fsdp_state")), None)
    if unit is None:
        return None
    context = getattr(unit._get_fsdp_state(), "_state_ctx", None)
    groups = (g for state in getattr(context, "all_states", ()) for g in _groups(state))
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        if getattr(parameter, "_unsharded_param", None) is weight:
            return parameter.sharded_param
    return None
