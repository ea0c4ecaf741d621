"""Run a model in several ways: as it is, compiled, with our loss, with Liger-Kernel's kernels.

Before torch 2.14, a model that is compiled as a whole gets an attention mask that it does not need
otherwise; one that is compiled layer by layer does not.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch import apply_patch
from liger_patch.layers.replace import count_layers

from .models import has_sliding_attention

Loss = Callable[[Mapping[str, Tensor]], Tensor]  # batch -> ()

MASKED = "liger_patch, layers, with masks"  # of packed and padded rows, and sliding windows
NAMES = (
    "eager",
    "torch.compile",
    "Liger, loss only",
    "Liger, all kernels",
    "liger_patch",
    "liger_patch, layers",
    MASKED,
    "liger_patch, layers, compiled",
    "liger_patch, layers, compiled by layer",
)
LOSS_ONLY = dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu"), False)


def contenders(
    model: nn.Module, *, compiled: bool = False, masked: bool = False
) -> dict[str, Callable[[], Loss]]:
    """Return functions that make the contenders of a model, some of NAMES, eager first.

    All share the weights of ``model``. ``masked``: whether the batch is packed or padded.
    """
    found: dict[str, Callable[[], Loss]] = {"eager": partial(_eager, model)}
    if compiled:
        found["torch.compile"] = partial(_compiled, model)
    if find_spec("liger_kernel"):
        found["Liger, loss only"] = partial(_liger, model, **LOSS_ONLY)
        found["Liger, all kernels"] = partial(_liger, model)
    found["liger_patch"] = partial(_ours, model)
    layers = partial(_ours, model, layers=True)
    found["liger_patch, layers"] = layers
    if masked or has_sliding_attention(model.config):
        found[MASKED] = partial(_ours, model, layers=True, masked=True)
    if compiled:
        found["liger_patch, layers, compiled"] = partial(layers, compiled=_whole)
        found["liger_patch, layers, compiled by layer"] = partial(layers, compiled=_by_layer)
    return found


def some_contenders(
    names: Sequence[str] | None, model: nn.Module, **options: bool
) -> dict[str, Callable[[], Loss]]:
    """Return eager and those ``contenders`` of a model that have these names; None: all."""
    found = contenders(model, **options)
    return {name: make for name, make in found.items() if name in ("eager", *(names or NAMES))}


def shared_copy(model: nn.Module) -> Any:
    """Return new modules around the same weights, so that a patch leaves ``model`` as it is."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)


def _eager(model: nn.Module) -> Loss:
    return partial(_loss, shared_copy(model))


def _compiled(model: nn.Module) -> Loss:
    torch.compiler.reset()
    return partial(_loss, _whole(shared_copy(model)))


def _ours(
    model: nn.Module,
    *,
    layers: bool = False,
    masked: bool = False,
    compiled: Callable[[Any], Any] | None = None,
) -> Loss:
    own = shared_copy(model)
    apply_patch(own, layers=layers)
    if masked:
        names = [name for name, n in count_layers(own).items() if n and name != "attention"]
        apply_patch(own, layers=names)
    if compiled is None:
        return partial(_loss, own)
    torch.compiler.reset()
    return partial(_loss, compiled(own))


def _whole(model: Any) -> Any:
    return torch.compile(model, dynamic=False)


def _by_layer(model: Any) -> Any:
    for layer in model.get_decoder().layers:
        layer.compile(dynamic=False)
    return model


def _liger(model: nn.Module, **kernels: bool) -> Loss:
    """Return the loss of a copy with Liger-Kernel's patch.

    The patch replaces functions of the model's module in Transformers, that is, of all models of
    that architecture. These replacements are in place only while this contender runs.
    """
    own = shared_copy(model)
    inner = own.get_base_model() if hasattr(own, "get_base_model") else own
    module = sys.modules[type(inner).__module__]
    before = dict(vars(module))
    liger = import_module("liger_kernel.transformers.monkey_patch")
    try:
        liger._apply_liger_kernel_to_instance(inner, **kernels)
    finally:
        now = vars(module)
        replacements = {name: now[name] for name in before if now[name] is not before[name]}
        now.update(before)

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        with _replaced(module, replacements):
            return _loss(own, batch)

    return loss


def _loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


@contextlib.contextmanager
def _replaced(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
