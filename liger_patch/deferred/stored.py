"""Find the parameter that the optimizer changes behind a weight that an engine has gathered.

Engines shard a parameter, and gather another tensor from the shards for the forward pass. There is
no public API for this: attributes of torch 2.6 to 2.13 are read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from liger_patch.deferred.engines import groups_of

_stored: Any = WeakIdKeyDictionary()  # weight -> the parameter behind it; None: there is no other


def stored_parameter(weight: Tensor, model: nn.Module) -> Tensor:
    """Return the parameter that the optimizer changes: the shard of a weight that an engine has
    gathered, else the weight itself.
    """
    # the walk over all modules takes milliseconds, and finds the same each time
    if weight not in _stored:
        _stored[weight] = _shard_of(weight, model)
    stored = _stored[weight]
    return weight if stored is None else stored


def note_stored(weight: Tensor, parameter: Tensor | None) -> None:
    """Note the parameter behind a weight; None for a copy, which no optimizer changes."""
    _stored[weight] = parameter


def _shard_of(weight: Tensor, model: nn.Module) -> Tensor | None:
    unit: Any = next((m for m in model.modules() if hasattr(type(m), "_get_fsdp_state")), None)
    if unit is None:
        return None
    context = getattr(unit._get_fsdp_state(), "_state_ctx", None)
    groups = (g for state in getattr(context, "all_states", ()) for g in groups_of(state))
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        if getattr(parameter, "_unsharded_param", None) is weight:
            return parameter.sharded_param
    return None
