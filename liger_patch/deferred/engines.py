"""What engines do with the parameters of a model that they shard.

PyTorch's FSDP gathers the parameters of a unit of modules for the unit's forward and for its
backward pass. ``has_flat_units`` is about FSDP1, ``is_partitioned`` about DeepSpeed's ZeRO-3, and
most else about FSDP2 (``fully_shard``). There is no public API for most of this: attributes of
torch 2.6 to 2.13 and of DeepSpeed are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed import _composable_state
from torch.utils.weak import WeakIdKeyDictionary

# gathered weight or copy -> the parameter behind it, None for a copy. No other weights are keys:
# PyTorch cannot move (``model.to``) a DTensor that has a weak reference.
_stored: Any = WeakIdKeyDictionary()


def in_process_group() -> bool:
    """Return whether this process belongs to a group."""
    return distributed.is_available() and distributed.is_initialized()


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether DeepSpeed's ZeRO-3 partitions this parameter."""
    return hasattr(parameter, "ds_id")


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit of ``fully_shard``."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions have one
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def resharding_units(modules: Iterable[nn.Module]) -> list[Any]:
    """Return those of the modules that are units which free their parameters after their forward.
    A unit whose setting cannot be read counts as one that does.
    """
    units: list[Any] = [module for module in modules if _is_unit(module)]
    return [unit for unit in units if any(map(_reshards, groups_of(unit._get_fsdp_state())))]


def has_flat_units(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules is a unit of FSDP1 (``FullyShardedDataParallel``)."""
    names = (cls.__name__ for module in modules for cls in type(module).__mro__)
    return "FullyShardedDataParallel" in names


def _is_unit(module: nn.Module) -> bool:
    return hasattr(type(module), "_get_fsdp_state")


def can_be_kept(unit: Any) -> bool:
    """Return whether ``without_resharding`` knows how to keep the parameters of a unit."""
    state = unit._get_fsdp_state()
    groups = groups_of(state)
    return hasattr(state, "_is_root") and all(hasattr(g, "post_forward_mesh_info") for g in groups)


def free_what_was_kept(unit: Any) -> None:
    """Free the parameters that ``without_resharding`` kept in a forward pass without a backward
    pass: the optimizer may have changed the shards since.
    """
    if any(getattr(group, "is_unsharded", False) for group in groups_of(unit._get_fsdp_state())):
        unit.reshard()


@contextmanager
def without_resharding(unit: Any) -> Iterator[None]:
    """Keep the parameters of a unit whose forward runs within this context, until its backward
    pass.
    """
    state = unit._get_fsdp_state()
    groups = [group for group in groups_of(state) if _reshards(group)]
    meshes = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None  # set_reshard_after_forward(False), which can be undone
    try:
        yield
    finally:
        # the outermost unit is told in its first forward pass that it does not reshard
        if not (state._is_root and getattr(state, "_auto_reshard_after_forward", False)):
            for group, mesh in zip(groups, meshes, strict=True):
                group.post_forward_mesh_info = mesh


def _reshards(group: Any) -> bool:
    return getattr(group, "_reshard_after_forward", True)


def stored_parameter(weight: Tensor, model: nn.Module) -> Tensor:
    """Return the parameter that the optimizer changes: the shard of a weight that an engine has
    gathered, else the weight itself.
    """
    if weight in _stored:
        stored = _stored[weight]
        return weight if stored is None else stored
    stored = _shard_of(weight, model)
    if stored is None:
        return weight
    _stored[weight] = stored
    return stored


def note_stored(weight: Tensor, parameter: Tensor | None) -> None:
    """Note the parameter behind a weight; None for a copy, which no optimizer changes."""
    _stored[weight] = parameter


def _shard_of(weight: Tensor, model: nn.Module) -> Tensor | None:
    if not _composable_state._module_state_mapping:  # the walk takes milliseconds
        return None
    unit: Any = next((m for m in model.modules() if hasattr(type(m), "_get_fsdp_state")), None)
    if unit is None:
        return None
    context = getattr(unit._get_fsdp_state(), "_state_ctx", None)
    groups = (g for state in getattr(context, "all_states", ()) for g in groups_of(state))
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        if getattr(parameter, "_unsharded_param", None) is weight:
            return parameter.sharded_param
    return None
