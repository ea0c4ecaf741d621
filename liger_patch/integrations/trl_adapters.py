"""TRL: adapters on the head, which TRL's trainers refuse and its fused head would leave out.

TRL's head multiplies by ``lm_head.weight``, which does not contain the adapters. The deferred
logits of liger_patch do. So a trainer of this package accepts such a model. If its head cannot be
fused, the trainer reads the logits of the model's own forward. After ``revert_patch``, calls of
TRL's head on such a model are an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from liger_patch.kernels import reference
from liger_patch.kernels.linear_log_probs import LogProbs
from liger_patch.patch.packing import IGNORE_INDEX

REFUSED = "BaseTunerLayer"  # the class by which the modules of TRL's trainers know such a head
_REPLACED = threading.RLock()  # held while that name is replaced


@contextlib.contextmanager
def adapters_on_head_allowed(trainer: type) -> Iterator[None]:
    """Let the constructor of a trainer of TRL take a model with adapters on its head.

    TRL asks ``isinstance(head, BaseTunerLayer)`` in the trainer's own module, of a model that it
    may have loaded and wrapped itself. Within this context nothing is an instance there: for the
    whole constructor, precomputed references included. TRL's name is back when it returns or fails.

    The name belongs to the module, so it is replaced for all threads. Constructors with the flag
    wait for each other. But a constructor without the flag, of the same trainer in another thread,
    does not refuse adapters meanwhile: build such trainers one after another.
    """
    names = vars(sys.modules[trainer.__module__])
    if REFUSED not in names:
        yield
        return
    with _REPLACED:
        own = names[REFUSED]
        names[REFUSED] = ()
        try:
            yield
        finally:
            names[REFUSED] = own


def has_adapters_on_head(model: PreTrainedModel) -> bool:
    """Return True if PEFT's adapters are on the head, also if they are disabled or merged now."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(model.get_output_embeddings(), tuners.BaseTunerLayer)


def refusing_adapters(model: PreTrainedModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward that TRL gave a model, for a reverted model with adapters on its head: a
    call of TRL's head is a RuntimeError for as long as they are there.
    """
    # a copy of the model has a copy of the partial, which calls the copy's forward
    return functools.update_wrapper(functools.partial(_refuse_adapters, model, forward), forward)


def without_refusal(forward: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return what ``refusing_adapters`` was given, or another forward as it is."""
    if isinstance(forward, functools.partial) and forward.func is _refuse_adapters:
        return forward.args[1]
    return forward


def _refuse_adapters(
    model: PreTrainedModel, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("fused_lm_head") and has_adapters_on_head(model):
        raise RuntimeError(
            f"{type(model).__name__} has adapters on its head, which TRL's own fused head leaves "
            "out: after revert_patch(model), call apply_trl_patch(model) before it is trained or "
            "evaluated by a trainer of TRL, or merge them with PEFT's merge_and_unload()"
        )
    return forward(*args, **kwargs)


def log_probs_of_logits(outputs: Any, labels: Tensor, temperature: float) -> LogProbs:
    """Compute from logits what TRL's head returns: the whole (B, T, V) in float32, or in float64.

    Args:
        outputs: of the model's own forward, with ``logits`` (B, T, V).
        labels: (B, T), those that the logits predict.
        temperature: the logits are divided by it.

    Returns:
        (B * T,) of each.
    """
    logits: Tensor = outputs.logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.reshape(-1)
    return reference.log_probs(logits, labels, ignore_index=IGNORE_INDEX, temperature=temperature)
