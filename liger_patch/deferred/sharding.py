"""Heads whose weight an engine frees before the loss: keep what was gathered for the head's call.

The head is the last layer of the forward pass and the first of the backward pass, so what was
gathered for the one serves the other (FSDP2), or a copy of it stays for the loss (FSDP1), and the
engine reduces its gradient as its own. No rank gathers anything for the loss: what a rank does with
its batch changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from liger_patch.deferred.fully_sharded import (
    can_be_kept,
    free_what_was_kept,
    has_flat_units,
    resharding_units,
    without_resharding,
)
from liger_patch.deferred.stored import is_partitioned, note_stored
from liger_patch.deferred.zero3 import calling_hooks_later, gathered, has_known_hooks

Hold = Callable[[Tensor], Tensor]  # of a gathered parameter, what stays when it is freed


def why_weight_is_freed(head: nn.Module) -> str | None:
    """Return why the head's weight is gone when the loss is computed; None where it stays, by
    itself or within ``keeping_weight``.
    """
    freed = "frees the head's weight before the loss"
    units = resharding_units(head)
    if any(is_partitioned(parameter) for parameter in head.parameters()):
        engine, is_known = "DeepSpeed ZeRO-3", has_known_hooks(head)
    elif units:
        engine, is_known = "FSDP", all(map(can_be_kept, units))
    elif has_flat_units(head):
        engine, is_known = "FSDP", True
    else:
        return None
    if not is_known:
        return f"{engine} {freed}, in a way that liger_patch does not know"
    if any(type(m).__module__.startswith("bitsandbytes") for m in head.modules()):
        return f"{engine} {freed}, and the head is quantized"
    if torch.compiler.is_compiling():
        return f"{engine} {freed}, and torch.compile traces the whole forward pass"
    return None


@contextmanager
def keeping_units(head: nn.Module | None) -> Iterator[None]:
    """Keep the parameters of FSDP's units in a head from their forward within this context to the
    backward pass: of every forward pass with gradients, with labels or without, fused or not. A
    rank that decides otherwise for its own batch would make other collectives than the rest.
    """
    units = [] if head is None or why_weight_is_freed(head) is not None else resharding_units(head)
    with ExitStack() as stack:
        for unit in units:
            free_what_was_kept(unit)
            if torch.is_grad_enabled():
                stack.enter_context(without_resharding(unit))
        yield


@contextmanager
def keeping_weight(head: nn.Module) -> Iterator[Hold]:
    """Give deferred logits a weight that stays until the backward pass, for a head that is called
    within this context and within ``keeping_units``.

    Without gradients there is no backward pass that would free it: FSDP does so after the head's
    call, and a copy stays for as long as the logits do. So it does with gradients under FSDP1,
    which gathers the weight again before the backward pass.

    Yields:
        what makes a gathered parameter of the head one that stays.
    """
    if any(is_partitioned(parameter) for parameter in head.parameters()):
        with calling_hooks_later(head):
            yield _values
    else:
        yield _copy if has_flat_units(head) or resharding_units(head) else _itself


def _itself(parameter: Tensor) -> Tensor:
    return parameter


def _copy(parameter: Tensor) -> Tensor:
    copy = parameter.clone()
    note_stored(copy, None)
    return copy


def _values(parameter: Tensor) -> Tensor:
    if not is_partitioned(parameter):
        return parameter
    values = gathered(parameter)
    note_stored(values, parameter)
    return values
