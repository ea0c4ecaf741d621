"""What saves memory for long rows under gradient checkpointing: whether a feed-forward layer runs
in slices, and from which input a norm can be computed again.

The answers must be the same when checkpointing computes a layer again, whatever other threads do.
So nothing here asks ``torch.compiler.is_compiling``, which is true in all threads while one
compiles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from liger_patch.kernels.chunk_sizes import slice_tokens
from liger_patch.kernels.graphs import in_tracing_mode
from liger_patch.kernels.rms_norm import NormInputs
from liger_patch.layers.checks import TOP_HOOKS

LONG_INPUT_BYTES = 128 * 2**20  # of x: 16k tokens of 4096 features in 16 bits


def is_checkpointed() -> bool:
    """Return whether gradient checkpointing runs a layer now: for the first time, or again.

    Non-reentrant checkpointing has hooks of saved tensors, both times. Reentrant checkpointing runs
    a layer without gradients, as evaluation does, and then within the backward pass. False with
    torch 2.6, which does not tell its hooks.
    """
    if TOP_HOOKS is None or torch.compiler.is_dynamo_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    hooks = TOP_HOOKS(False)
    if hooks is None:
        return torch._C._current_graph_task_id() != -1
    return getattr(hooks[0], "__module__", None) == checkpoint.__name__


def tokens_of_slice(x: Tensor, size: int, dtype: torch.dtype) -> int | None:
    """Return the tokens of a slice, for a feed-forward layer of x (..., H). None for no slices: if
    the row is short, or if checkpointing does not compute the layer again.

    Args:
        size: the intermediate size.
        dtype: of the products.
    """
    if not is_checkpointed() or _is_in_graph() or torch._C._is_tracing() or x.dim() == 0:
        return None
    return slice_tokens(math.prod(x.shape[:-1]), size, dtype.itemsize)


def note_source(y: Tensor, x: Tensor, weight: Tensor | None, *how: Any) -> None:
    """Note on a norm's result the input that it was computed from, if the result is large: a layer
    behind the norm then keeps only that input. For layers that checkpointing computes again.

    Args:
        how: eps, offset and dtype of the norm.
    """
    if _is_in_graph() or y.dim() > 3:  # of queries or keys: nothing keeps these
        return
    if y.nbytes > LONG_INPUT_BYTES:
        noted: Any = y
        source = NormInputs(x.detach(), weight, *how)
        noted._liger_patch_source = source, x._version, y._version


def source_of(x: Tensor) -> NormInputs | None:
    """Return what ``note_source`` has noted on x; None where x or that input has changed since."""
    noted = getattr(x, "_liger_patch_source", None)
    if noted is None:
        return None
    source, *versions = noted
    return source if [source.x._version, x._version] == versions else None


def _is_in_graph() -> bool:
    """Return whether this thread traces a graph. Slices would make the graph large, and comparing
    sizes would add guards.
    """
    return torch.compiler.is_dynamo_compiling() or in_tracing_mode()
