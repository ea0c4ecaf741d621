"""Heads whose weight an engine frees before the loss: keep the weight gathered for the head's call.

The head is the last layer of the forward pass and the first of the backward pass. So the weight
that was gathered for its forward also serves its backward pass (FSDP2), or a copy of it stays for
the loss (FSDP1). The engine reduces the weight's gradient as always. No rank gathers anything for
the loss, so the ranks make the same collectives whatever each does with its batch.

DeepSpeed's ZeRO-3 partitions parameters over the ranks: each module gathers its own before its
forward and frees them after it, and does so again in the backward pass. Deferred logits hold the
memory that was gathered for the head's call. There is no public API for this: attributes of
DeepSpeed's modules and parameters are read (0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
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
from liger_patch.deferred.record import Recordable
from liger_patch.deferred.tensor import ancestry
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
def keeping_weight(model: nn.Module, head: nn.Module) -> Iterator[Hold | None]:
    """Give deferred logits a weight that stays until the backward pass, for a head that is called
    within this context and within ``keeping_units``.

    Without gradients, FSDP frees the weight after the head's call: there, a copy stays for as long
    as the logits do. Under FSDP1 a copy stays with gradients too, because FSDP1 gathers the weight
    again for the backward pass.

    Yields:
        A function from the inputs of a product to inputs that stay; None where nothing frees them.
    """
    if any(is_partitioned(parameter) for parameter in head.parameters()):
        with calling_hooks_later(head):
            yield _held
    else:
        modules = _modules_that_end_before_loss(model, head)
        yield _copied if has_flat_units(modules) or resharding_units(modules) else None


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


def _copied(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Inputs:
    return hidden_states, _copy(weight), None if bias is None else _copy(bias)


def _copy(parameter: Tensor) -> Tensor:
    copy = parameter.clone()
    note_stored(copy, None)
    return copy


def _held(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Inputs:
    """Return the inputs of a product with gathered parameters, whose gradients are theirs."""
    inputs: Any = _Call.apply(hidden_states, weight, bias)
    for values, parameter in zip(inputs[1:], (weight, bias), strict=True):
        if values is not None:
            note_stored(values, parameter)
    return inputs


def has_known_hooks(head: nn.Module) -> bool:
    """Return whether the engine's hooks on the head are those that ``calling_hooks_later`` knows.
    Before the engine is made there are none, and the answer is False.
    """
    return all(hasattr(getattr(module, "pre_bwd_fn", None), "apply") for module in head.modules())


class _Call(torch.autograd.Function):
    """One product of a module of the head: its inputs, with values that stay when the engine frees
    the parameters.

    The node is one for all inputs of the call. So its backward pass stands where the module's own
    would: after that of later calls, behind which the engine frees the parameters again, and before
    the gradients reach the parameters.
    """

    before: list[Callable[[], object]]  # what the engine does before that of the modules around

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_states, *parameters = inputs
        assert hidden_states is not None
        values = [None if each is None else each.data for each in parameters]
        held = (hidden_states.view_as(hidden_states), *values)
        frozen = [h for h, n in zip(held, ctx.needs_input_grad, strict=True) if not n]
        ctx.mark_non_differentiable(*(each for each in frozen if each is not None))
        ctx.set_materialize_grads(False)
        ctx.before = []
        return held

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):
        for function in reversed(ctx.before):  # the outermost module's first
            function()
        return gradients


@contextmanager
def calling_hooks_later(head: nn.Module) -> Iterator[None]:
    """Within this context, do not apply the engine's autograd functions to deferred logits that
    modules of the head return. Instead, what their backward does (it gathers the parameters) runs
    in that of their products.
    """
    with ExitStack() as stack:
        for module in head.modules():
            if "pre_bwd_fn" in vars(module):
                function = vars(module)["pre_bwd_fn"]
                stack.callback(setattr, module, "pre_bwd_fn", function)
                vars(module)["pre_bwd_fn"] = _Later(function)
        yield


class _Later:
    """Stands for an autograd function of the engine, and leaves deferred logits as they are."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def apply(self, output: Tensor) -> Tensor:
        if not isinstance(output, Recordable):
            return self.function.apply(output)
        if output.requires_grad:
            node = self.function.apply(torch.zeros((), requires_grad=True)).grad_fn
            if not (hasattr(node, "pre_backward_function") and hasattr(node, "module")):
                return self.function.apply(output)  # of another version: computes the logits
            _first_in_backward(output).before.append(
                partial(node.pre_backward_function, node.module)
            )
        return output


def _first_in_backward(logits: Recordable) -> Any:
    """Return the node, among those of the products in these logits, whose backward pass runs first:
    the last one. From then on, the engine expects the module around all of them to be ready.
    """
    tensors = (each for node in ancestry(logits) for each in node.head_call.tensors)
    nodes = [each.grad_fn for each in tensors if each is not None and each.grad_fn is not None]
    return max(nodes, key=lambda node: node._sequence_nr())
