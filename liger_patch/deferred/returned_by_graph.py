"""Deferred logits in a graph that ``make_fx`` or ``torch.export`` records call by call.

There the logits are ``DeferredLogits`` of tensors without values. A graph that returns them must
compute them, and one that does not return them should not: whether it does is known at its end.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from liger_patch.deferred.record import Recordable


class _Result:
    """What the graph looks up when it returns deferred logits."""

    def __init__(self, logits: Recordable, tracer: Any) -> None:
        self._logits, self._tracer = ref(logits), tracer

    @property
    def proxy(self) -> Any:
        """Return the proxy of the real logits, which become a part of the graph."""
        logits: Any = self._logits()
        values: Any = get_proxy_slot(logits.real_logits(), self._tracer)
        return values.proxy


def compute_if_returned(logits: Recordable) -> None:
    """Make a graph that is recorded now compute these logits if it returns them."""
    mode = get_proxy_mode()
    if mode is not None:
        tracer: Any = mode.tracer
        tracer.tensor_tracker[logits] = _Result(logits, tracer)
