"""Attention of Transformers' models without the mask of packed sequences, sliding windows or
padding.

Transformers hands ``scaled_dot_product_attention`` a mask (B, 1, T, T) for these. The attention
function here reads the mask once a forward pass, and computes with ``segment_attention`` what it
describes. For any other mask, and without one, it calls Transformers' own function.

What a padded token gives is another result without the mask. So a mask with padding is left out
only where a call has labels, and none for a padded token.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from liger_patch.kernels.backend import autocast_dtype, in_tracing_mode, is_compiled_here
from liger_patch.kernels.segments import (
    Segments,
    segment_attention,
    segments_of,
    serves_flash_attention,
)
from liger_patch.layers.checks import names_of, needs_own_code

TABLE = "ALL_ATTENTION_FUNCTIONS"  # the name by which attentions look their function up
NOTED = "_liger_patch_segments"  # attribute of a mask: what it describes, and for which mask
# arguments of Transformers' function that this one does not know, or refuses
OTHERS = {
    *inspect.signature(sdpa_attention_forward).parameters,
    "softcap",
    "output_attentions",
} - {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    "kwargs",
}

_running = threading.local()  # the Supervised tokens of the call that this thread runs


class Supervised:
    """The tokens of a call whose results are used: those with a label to predict."""

    def __init__(self, targets: Tensor, ignore_index: int) -> None:
        self._targets, self._ignore_index = targets, ignore_index  # (B, T)

    def tokens(self, rows: int, mask: Tensor) -> Tensor | None:
        """Return (rows, T) bool for a mask (..., T); None where the labels have another shape."""
        if tuple(self._targets.shape) != (rows, mask.shape[-1]):
            return None
        return (self._targets != self._ignore_index).to(mask.device)


@contextmanager
def using_results_of(supervised: Supervised | None) -> Iterator[None]:
    """Within this context, only the results of these tokens are used; None: those of all."""
    before = getattr(_running, "supervised", None)
    _running.supervised = supervised
    try:
        yield
    finally:
        _running.supervised = before


class AttentionTable:
    """Transformers' table of attention functions, with ``attention`` in the place of its own
    function for ``scaled_dot_product_attention``.
    """

    def __init__(self, table: AttentionInterface) -> None:
        self._table = table

    def get_interface(self, name: str, default: Any) -> Any:
        return _replaced(self._table.get_interface(name, default))

    def __getitem__(self, name: str) -> Any:
        return _replaced(self._table[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def _replaced(function: Any) -> Any:
    return attention if function is sdpa_attention_forward else function


def is_causal_by_table(module: Any) -> bool:
    """Return whether an attention is causal and looks its function up in Transformers' table."""
    if getattr(module, "is_causal", None) is not True or TABLE not in names_of(type(module)):
        return False
    return type(type(module).forward.__globals__.get(TABLE)) is AttentionInterface


@functools.wraps(sdpa_attention_forward)
def attention(
    module: nn.Module,
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention (B, T, num_heads, D), and None for the weights."""
    segments = None
    if not _needs_mask(query, key, attention_mask, dropout, options):
        states = _as_autocast(query, key, value)
        if serves_flash_attention(*states):
            segments = _noted_segments(attention_mask, len(query))
        if segments is not None and not segments.is_causal:
            return segment_attention(*states, segments, scaling), None
    if segments is not None:  # whole rows: PyTorch may have a faster kernel
        attention_mask, is_causal = None, True
    how = dropout, scaling, is_causal
    return sdpa_attention_forward(module, query, key, value, attention_mask, *how, **options)


def _needs_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> bool:
    """Return whether Transformers' function must be given the mask, or None for none.

    It must where the call asks for what only that function has, is traced, or is not one of whole
    rows: as in generation with a cache.
    """
    tokens = query.shape[2]
    if mask is None or mask.dtype != torch.bool or mask.dim() != 4 or is_compiled_here():
        return True
    if tuple(mask.shape[1:]) != (1, tokens, tokens) or len(mask) not in (1, len(query)):
        return True
    if tokens != key.shape[2] or dropout or mask.is_inference():
        return True
    if any(options.get(name) is not None and options[name] is not False for name in OTHERS):
        return True
    if in_tracing_mode() or torch._C._is_tracing() or needs_own_code(query, key, mask):
        return True
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three in the dtype that autocast gives scaled_dot_product_attention."""
    dtype = autocast_dtype(query.device.type)
    if dtype is None:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _noted_segments(mask: Any, rows: int) -> Segments | None:
    """Return what a mask (rows or 1, 1, T, T) describes. It is read once, and noted on the mask:
    all layers of a forward pass share one, and checkpointing brings it again in the backward pass.
    """
    supervised = getattr(_running, "supervised", None)
    for_what = mask._version, rows
    noted_for, noted_with, segments = getattr(mask, NOTED, (None, None, None))
    is_again = torch._C._current_graph_task_id() != -1
    if noted_for != for_what or not (is_again or noted_with is supervised):
        used = None if supervised is None else supervised.tokens(rows, mask)
        segments = segments_of(mask[:, 0], rows, used)
        setattr(mask, NOTED, (for_what, supervised, segments))
    return segments
