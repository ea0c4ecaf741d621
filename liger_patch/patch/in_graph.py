"""Whether ``torch.compile`` makes a loss a part of a graph, or runs it between two."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from liger_patch.deferred.traced import TracedLogits
from liger_patch.kernels.graphs import inlined_only, is_exporting, runs_eagerly
from liger_patch.patch import flags

Method = TypeVar("Method", bound=Callable[..., Tensor])


def gives_logits_to_loss(original: type[PreTrainedModel]) -> bool:
    """Return whether a class gives its logits to ``self.loss_function``, in a way that a graph of
    torch.compile can record: for nn.CrossEntropyLoss and functions of torch.nn.functional, Dynamo
    does not ask ``__torch_function__`` in every case.
    """
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    names = () if code is None else code.co_names
    return "loss_function" in names and not {"CrossEntropyLoss", "functional", "F"} & {*names}


def in_graph_of_logits(method: Method) -> Method:
    """Decorate a method that computes a loss, so that torch.compile knows where it runs.

    It becomes a part of the graph if the logits were deferred in that graph, and with
    LIGER_PATCH_RETURN_LOGITS=1. For any other logits, it runs between two graphs.
    """
    between_graphs = runs_eagerly(method)

    @functools.wraps(method)
    def compute(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        in_graph = torch.compiler.is_dynamo_compiling()
        if in_graph and (isinstance(logits, TracedLogits) or flags.return_logits()):
            return method(self, logits, *args, **kwargs)
        if in_graph and is_exporting():
            raise RuntimeError(
                "torch.export(strict=True) needs torch 2.11, and does not let liger_patch see how "
                "the model scales or caps its logits, or adapts its head: export with "
                "strict=False, or with LIGER_PATCH_RETURN_LOGITS=1"
            )
        if isinstance(logits, TracedLogits):  # they have left their graph
            logits = logits.deferred  # the model breaks it after the head
        return between_graphs(self, logits, *args, **kwargs)

    return cast(Method, inlined_only(compute))
