"""Derive the classes of backbones whose masks are deferred, each from its own class.

A backbone's own code runs, with others of Transformers' functions that make causal masks. These
run their own code too, with another table of mask functions: there, ``deferred_sdpa_mask`` stands
for Transformers' ``sdpa_mask``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from liger_patch.kernels.graphs import in_tracing_mode, is_compiled_here, is_watched_by_dynamo
from liger_patch.layers.checks import is_left_to_model, layers_of
from liger_patch.layers.deferred_mask import deferred_sdpa_mask
from liger_patch.layers.masked_attention import used_tokens_of_call
from liger_patch.layers.other_globals import (
    OtherTable,
    decorated_again,
    names_in,
    with_other_globals,
)
from liger_patch.layers.unpadded import without_padding
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class

DEFERS_MASKS = "_liger_patch_defers_masks"  # attribute of such a class
TABLE = "ALL_MASK_ATTENTION_FUNCTIONS"  # the name by which these look a mask function up
MAKERS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
)

_running = threading.local()  # whether the backbone that this thread runs may defer masks


def mask_deferring_class(module: nn.Module) -> Any:
    """Return the class of a backbone whose masks are deferred, None for any other module: its code
    must be Transformers' own, make masks, and have attention on kernels within.
    """
    original: Any = type(module)
    if not isinstance(module, PreTrainedModel) or not is_transformers(original.forward):
        return None
    if not any("attention" in layers_of(each) for each in module.modules()):
        return None
    return deferring_masks(original) if _deferring(original.forward) else None


@once_for_each_class
def deferring_masks(original: Any) -> type[nn.Module]:
    """Derive the class of a backbone whose masks are deferred in calls of a patched model."""
    own = original.forward
    deferring = _deferring(own) or own  # of a pickle: other functions may make masks here

    @functools.wraps(own)
    def forward(self, *arguments: Any, **options: Any) -> Any:
        x = arguments[0] if arguments else options.get("input_ids")
        x = options.get("inputs_embeds") if x is None else x
        used = used_tokens_of_call()
        if used is None or _needs_masks() or is_left_to_model(self, x):
            return own(self, *arguments, **options)
        before = getattr(_running, "may_defer", None)
        _running.may_defer = functools.cache(functools.partial(_may_defer, self))
        try:
            y = without_padding(self, deferring, arguments, options, used, _running.may_defer)
            return deferring(self, *arguments, **options) if y is None else y
        finally:
            _running.may_defer = before

    return derived_class(original, deferring_masks, forward=forward, **{DEFERS_MASKS: True})


def _deferring(function: Any) -> Any:
    """Return a backbone's forward, or one of the MAKERS that it calls, with deferred masks; None
    where it makes none by Transformers' functions.
    """
    own = inspect.unwrap(function)
    if not isinstance(own, types.FunctionType):
        return None
    module, names = own.__globals__, names_in(own.__code__)
    values = {
        name: _deferring(module[name])
        for name in MAKERS
        if name in names and module.get(name) is getattr(masking_utils, name)
    }
    if TABLE in names and type(module.get(TABLE)) is AttentionMaskInterface:
        values[TABLE] = OtherTable(module[TABLE], {sdpa_mask: _sdpa_mask})
    values = {name: value for name, value in values.items() if value is not None}
    if not values:
        return None
    other, look_up = with_other_globals(own, values)

    @functools.wraps(own)
    def deferring(*arguments: Any, **options: Any) -> Any:
        look_up()
        return other(*arguments, **options)

    return decorated_again(function, deferring)


def _sdpa_mask(*arguments: Any, **options: Any) -> Any:
    return deferred_sdpa_mask(_running.may_defer, *arguments, **options)


def _needs_masks() -> bool:
    """Return whether masks cannot be left out where this thread is."""
    if is_compiled_here() or is_watched_by_dynamo() or torch.is_inference_mode_enabled():
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    is_traced = torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
    return is_traced or in_tracing_mode()


def _may_defer(backbone: nn.Module) -> bool:
    """Return whether no module of a backbone that may be given its masks takes their memory: a
    graph of torch.compile does, and it may stand behind a forward that an instance has of its own.
    """
    modules: list[Any] = [backbone]
    takes_masks = functools.cache(_takes_masks)
    for module in modules:  # which grow
        cls = type(module)
        if not takes_masks(cls):
            continue
        # compiled functions have this attribute
        if hasattr(cls.forward, "_torchdynamo_orig_callable") or issubclass(cls, OptimizedModule):
            return False
        if module._compiled_call_impl is not None:
            return False
        if module is not backbone and "forward" in vars(module):
            return False
        if not layers_of(module):  # no module within is given the mask
            modules.extend(each for each in module._modules.values() if each is not None)
    return True


def _takes_masks(cls: Any) -> bool:
    """Return whether modules of a class may be given a mask: norms, linear and feed-forward layers
    are not.
    """
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return True
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any("mask" in name for name in names)
