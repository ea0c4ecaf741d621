"""Heads whose weight an engine frees before the loss: keep the weight gathered for the head's call.

The head is the last layer of the forward pass and the first of the backward pass. So the weight
that was gathered for its forward also serves its backward pass (FSDP2), or a copy of it stays for
the loss (FSDP1). The engine reduces the weight's gradient as always. No rank gathers anything for
the loss, so the ranks make the same collectives whatever each does with its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_patch.deferred.engines import (
    can_be_kept,
    free_what_was_kept,
    has_flat_units,
    is_partitioned,
    note_stored,
    resharding_units,
    without_resharding,
)
from liger_patch.deferred.zero3 import calling_hooks_later, has_known_hooks, held_inputs
from liger_patch.kernels.graphs import is_in_compiled_call

# from hidden states, weight and bias of a product to inputs that stay when the weight is freed
Inputs = tuple[Tensor, Tensor, Tensor | None]
Hold = Callable[[Tensor, Tensor, Tensor | None], Inputs]
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # of heads, in their models


def why_weight_cannot_be_kept(model: nn.Module, head: nn.Module) -> str | None:
    """Return why the head's weight cannot be kept until the model has computed its loss; None where
    it stays, by itself or within ``keeping_weight``.
    """
    freed = "frees the head's weight before the loss"
    modules = _modules_that_end_before_loss(model, head)
    units = resharding_units(modules)
    if any(is_partitioned(parameter) for parameter in head.parameters()):
        engine, is_known = "DeepSpeed ZeRO-3", has_known_hooks(head)
    elif units:
        engine, is_known = "FSDP", all(map(can_be_kept, units))
    elif has_flat_units(modules):
        engine, is_known = "FSDP", True
    else:
        return None
    if not is_known:
        return f"{engine} {freed}, in a way that liger_patch does not know"
    if is_in_compiled_call():
        return f"{engine} {freed}, and torch.compile traces the whole forward pass"
    return None


@contextmanager
def keeping_units(model: nn.Module, head: nn.Module | None) -> Iterator[None]:
    """Keep the parameters of FSDP's units in a head and around it, from their forward within this
    context to the backward pass.

    This holds for every forward pass with gradients: with labels or without, fused or not. If it
    depended on the batch of a rank, the ranks would make different collectives.
    """
    units = []
    if head is not None and why_weight_cannot_be_kept(model, head) is None:
        units = resharding_units(_modules_that_end_before_loss(model, head))
    with ExitStack() as stack:
        for unit in units:
            free_what_was_kept(unit)
            if torch.is_grad_enabled():
                stack.enter_context(without_resharding(unit))
        yield


@contextmanager
def keeping_weight(model: nn.Module, head: nn.Module) -> Iterator[Hold]:
    """Give deferred logits a weight that stays until the backward pass, for a head that is called
    within this context and within ``keeping_units``.

    Without gradients, FSDP frees the weight after the head's call: there, a copy stays for as long
    as the logits do. Under FSDP1 a copy stays with gradients too, because FSDP1 gathers the weight
    again for the backward pass.

    Yields:
        A function from the inputs of a product to inputs that stay.
    """
    if any(is_partitioned(parameter) for parameter in head.parameters()):
        with calling_hooks_later(head):
            yield _held
    else:
        modules = _modules_that_end_before_loss(model, head)
        yield _copied if has_flat_units(modules) or resharding_units(modules) else _as_they_are


def _modules_that_end_before_loss(model: nn.Module, head: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters of the head: those between the model and it, itself, and
    those within. An engine may free the parameters after the forward of each.
    """
    between = _modules_to(_names.get(head, ""), model)
    if not between or between[-1] is not head:  # the walk over all modules takes milliseconds
        _names[head] = _name_of(head, model)
        between = _modules_to(_names[head], model)
    return [*between[:-1], *head.modules()]


def _name_of(module: nn.Module, model: nn.Module) -> str:
    """Return the dotted name of a module in the model; empty if it is not there."""
    return next((name for name, each in model.named_modules() if each is module), "")


def _modules_to(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the modules from the model, without it, to that of this dotted name; [] for none."""
    found: list[nn.Module] = []
    module: nn.Module | None = model
    for part in name.split(".") if name else ():
        module = module._modules.get(part)
        if module is None:
            return []
        found.append(module)
    return found


def _as_they_are(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Inputs:
    return hidden_states, weight, bias


def _copied(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Inputs:
    return hidden_states, _copy(weight), None if bias is None else _copy(bias)


def _copy(parameter: Tensor) -> Tensor:
    copy = parameter.clone()
    note_stored(copy, None)
    return copy


def _held(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Inputs:
    inputs = held_inputs(hidden_states, weight, bias)
    for values, parameter in zip(inputs[1:], (weight, bias), strict=True):
        if values is not None:
            note_stored(values, parameter)
    return inputs
