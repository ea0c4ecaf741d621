"""Attention of Transformers' models without the mask of packed sequences, sliding windows or
padding.

Transformers hands ``scaled_dot_product_attention`` a mask (B, 1, T, T) for these, deferred where
``masks`` can. The attention function here reads the mask once a forward pass, and computes with
``segment_attention`` what it describes. For any other mask, and without one, it calls Transformers'
own function.

Padding gets another result without the mask. So a mask with padding is left out only where no
result of the padding is used: see ``UsedTokens``. Each call of a patched model reads its masks
anew: they may have changed. Calls of its inner model by itself keep them.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.graphs import in_tracing_mode, is_compiled_here
from liger_patch.kernels.segments import (
    MOST_NUMBERS,
    Segments,
    may_serve_flash_attention,
    segment_attention,
    segments_of,
    serves_flash_attention,
)
from liger_patch.layers.checks import names_of, needs_own_code
from liger_patch.layers.deferred_mask import DeferredMask

TABLE = "ALL_ATTENTION_FUNCTIONS"  # the name by which attentions look their function up
SDPA = nn.functional.scaled_dot_product_attention  # PyTorch's own: libraries replace it
# with a value for one of these arguments, Transformers' own function computes the attention
UNSUPPORTED = {
    *inspect.signature(sdpa_attention_forward).parameters,
    "softcap",
    "output_attentions",
} - {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    "kwargs",
}

_running = threading.local()  # the UsedTokens of the call that this thread runs
# what masks describe, as the last call has read them
_read: MutableMapping[Tensor, tuple[UsedTokens, tuple[int, int], Segments | None]]
_read = WeakTensorKeyDictionary()


class UsedTokens:
    """The tokens whose results one call of a patched model uses: a context for this call, in this
    thread. Only within such a context, masks are left out.

    Args:
        find: returns (B, T) bool, True for those tokens; None for all. It is called once, where the
            first mask is read.

    Attributes:
        without_padding: whether a mask with padding was left out in the call.
    """

    def __init__(self, find: Callable[[], Tensor | None] | None = None) -> None:
        self._find, self._used = find, None
        self.without_padding = False

    def __enter__(self) -> UsedTokens:
        self._before = getattr(_running, "used", None)
        _running.used = self
        return self

    def __exit__(self, *_: object) -> None:
        _running.used = self._before
        self._find = self._before = None  # holds the arguments of the call

    def of_mask(self, rows: int, mask: Tensor) -> Tensor | None:
        """Return (rows, T) bool for a mask (..., T); None for all tokens."""
        if self._find is not None:
            self._used, self._find = self._find(), None
        if self._used is None or tuple(self._used.shape) != (rows, mask.shape[-1]):
            return None
        return self._used.to(mask.device)


def leaves_masks_out() -> bool:
    """Return whether this thread runs a call of a patched model, in which masks are left out."""
    return getattr(_running, "used", None) is not None


def is_causal_by_table(module: Any) -> bool:
    """Return whether an attention is causal and looks its function up in Transformers' table."""
    if getattr(module, "is_causal", None) is not True or TABLE not in names_of(type(module)):
        return False
    forward = inspect.unwrap(type(module).forward)
    return type(forward.__globals__.get(TABLE)) is AttentionInterface


@functools.wraps(sdpa_attention_forward)
def attention(
    module: nn.Module,
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, T, D)
    value: Tensor,  # (B, num_key_value_heads, T, D)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention (B, T, num_heads, D), and None for the weights."""
    segments = None
    deferred = attention_mask if isinstance(attention_mask, DeferredMask) else None
    like = attention_mask if deferred is None else deferred.padding  # of the same shape
    if like is not None and not _needs_mask(query, key, like, dropout, options):
        dtype, states = autocast_dtype(query.device.type, query.dtype), (query, key, value)
        if dtype is not None:  # as autocast has it for scaled_dot_product_attention
            states = query.to(dtype), key.to(dtype), value.to(dtype)
        if serves_flash_attention(*states):
            segments = _segments_of_call(attention_mask, len(query))
        if segments is not None and not segments.is_causal:
            return segment_attention(*states, segments, scaling), None
    if segments is not None:  # whole rows: PyTorch may have a faster kernel
        attention_mask, is_causal = None, True
    elif deferred is not None:
        attention_mask = deferred.real_mask()
    # a flag of all threads: another thread that compiles puts the warning off
    if not torch.compiler.is_compiling() and query.requires_grad and query.numel() > MOST_NUMBERS:
        _warn_of_length(query)
    how = dropout, scaling, is_causal
    return sdpa_attention_forward(module, query, key, value, attention_mask, *how, **options)


def _warn_of_length(query: Tensor) -> None:
    if may_serve_flash_attention(query.device, autocast_dtype(query.device.type) or query.dtype):
        warnings.warn(
            f"liger_patch: attention over {query.numel():,} numbers of queries. Over more than "
            f"{MOST_NUMBERS:,}, gradients of PyTorch 2.11's flash attention were wrong: take "
            "shorter rows, or fewer of them at a time",
            stacklevel=2,
        )


def _needs_mask(
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, keys, D)
    mask: Tensor,
    dropout: float,
    options: dict[str, Any],
) -> bool:
    """Return whether Transformers' function must be given the mask.

    It must where the call asks for what only that function has, is traced, or is not one of whole
    rows: as in generation with a cache.
    """
    tokens = query.shape[2]
    if mask.dtype != torch.bool or mask.dim() != 4 or is_compiled_here():
        return True
    if tuple(mask.shape[1:]) != (1, tokens, tokens) or len(mask) not in (1, len(query)):
        return True
    if tokens != key.shape[2] or dropout or mask.is_inference():
        return True
    for name in options.keys() & UNSUPPORTED:
        if options[name] is not None and options[name] is not False:
            return True
    if nn.functional.scaled_dot_product_attention is not SDPA:
        return True
    if in_tracing_mode() or torch._C._is_tracing() or needs_own_code(query, key, mask):
        return True
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _segments_of_call(mask: Any, rows: int) -> Segments | None:
    """Return what a mask (rows or 1, 1, T, T) describes, None for a mask that is not left out.

    It is read once in a call of a patched model: layers share it, and checkpointing brings it again
    in the backward pass.
    """
    used: UsedTokens | None = getattr(_running, "used", None)
    read_for, read_of, segments = _read.get(mask, (None, None, None))
    deferred = mask if isinstance(mask, DeferredMask) else None
    of = rows, mask._version if deferred is None else deferred.writes()
    runs_again = torch._C._current_graph_task_id() != -1
    is_same = read_for is used and read_of == of
    if is_same or (runs_again and read_of is not None and read_of[0] == rows):
        return segments
    if used is None:
        return None
    with torch.inference_mode(False):
        if deferred is not None and not deferred.writes():
            segments = deferred.segments(rows, used.of_mask(rows, deferred.padding))
        else:  # somebody may have written to it
            values = mask if deferred is None else deferred.real_mask()
            segments = segments_of(values[:, 0], rows, used.of_mask(rows, values))
    used.without_padding |= segments is not None and segments.has_padding
    _read[mask] = used, of, segments
    return segments
