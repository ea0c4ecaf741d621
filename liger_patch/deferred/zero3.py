"""Heads under DeepSpeed's ZeRO-3, which partitions parameters over the ranks: each module gathers
its own before its forward and frees them after it, and does so again in the backward pass.

The engine is left to gather, free and reduce as it does without a patch. Deferred logits hold the
memory that was gathered for the head's call, so no rank gathers anything for the loss. DeepSpeed
has no public API for this: attributes of its modules and parameters are read (0.19).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.deferred.record import Recordable


def has_known_hooks(head: nn.Module) -> bool:
    """Return whether the engine's hooks on the head are those that ``calling_hooks_later`` knows.
    Before the engine is made there are none, and the answer is False.
    """
    return all(hasattr(getattr(module, "pre_bwd_fn", None), "apply") for module in head.modules())


class _Gathered(torch.autograd.Function):
    """A parameter's gathered values, which stay when the engine frees the parameter."""

    @staticmethod
    def forward(ctx, parameter: Tensor) -> Tensor:
        return parameter.data

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient


def gathered(parameter: Tensor) -> Tensor:
    """Return the gathered values of a parameter, whose gradient is the parameter's."""
    values: Any = _Gathered.apply(parameter)
    return values


@contextmanager
def calling_hooks_later(head: nn.Module) -> Iterator[None]:
    """Within this context, do not apply the engine's autograd functions to deferred logits that
    modules of the head return. Instead, what their backward does (it gathers the parameters) runs
    before the backward of the loss.
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
            output.register_hook(partial(before_backward, node))
        return output


def before_backward(node: Any, gradient: Tensor | None) -> None:
    """Call what the engine does before the backward pass of a module of the head."""
    node.pre_backward_function(node.module)
