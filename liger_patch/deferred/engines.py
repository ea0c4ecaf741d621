"""What engines tell of a model that they shard. There is no public API for most of this: attributes
of torch 2.6 to 2.13 and of DeepSpeed are read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed


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
