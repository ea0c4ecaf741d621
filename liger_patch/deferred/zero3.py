"""Heads under DeepSpeed's ZeRO-3, which partitions parameters over the ranks: each module gathers
its own before its forward and frees them after it, and does so again in the backward pass.

The engine is left to gather, free and reduce as it does without a patch. Deferred logits hold the
memory that was gathered for the head's call, so no rank gathers anything for the loss. DeepSpeed
has no public API for this: attributes of its modules and parameters are read (0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.deferred.gradients import ancestry
from liger_patch.deferred.record import Recordable


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


def held_inputs(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the inputs of a product with gathered parameters, whose gradients are theirs."""
    inputs: Any = _Call.apply(hidden_states, weight, bias)
    return inputs


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
    """Return the node of the product, of those in these logits, whose backward pass runs first: the
    last one. Behind it, the engine expects the module around all of them to be ready.
    """
    tensors = (each for node in ancestry(logits) for each in node.head_call.tensors)
    nodes = [each.grad_fn for each in tensors if each is not None and each.grad_fn is not None]
    return max(nodes, key=lambda node: node._sequence_nr())
