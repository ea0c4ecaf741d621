"""Heads under PyTorch's FSDP, which gathers the parameters of a unit of modules for the unit's
forward and for its backward pass. All is about FSDP2 (``fully_shard``), except ``has_flat_units``.

There is no public API for this: attributes of torch 2.6 to 2.13 are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from liger_patch.deferred.engines import groups_of


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
