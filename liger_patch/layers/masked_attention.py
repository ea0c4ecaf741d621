"""Attention of Transformers' models without the mask of packed sequences, sliding windows or
padding.

Transformers hands ``scaled_dot_product_attention`` a mask (B, 1, T, T) for these, deferred
where ``masks`` can. The attention function here reads the mask once a forward pass, and computes
with ``segment_attention`` what it describes. For any other mask, and without one, it calls
Transformers' own function.

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
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from liger_patch.deferred.ops import METADATA
from liger_patch.kernels.attention import (
    MOST_NUMBERS,
    add_sinks,
    may_serve_flash_attention,
    prefix_attention,
    segment_attention,
    serves_flash_attention,
    sink_attention,
)
from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.graphs import in_tracing_mode, is_compiled_here
from liger_patch.kernels.reference import segment_mask
from liger_patch.kernels.segments import Segments, segments_of
from liger_patch.layers.checks import few_numbers, names_of, needs_own_code, results_match
from liger_patch.subclass import is_transformers, once_for_each_class

EAGER = "eager_attention_forward"  # the name of the function of an attention's own file
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
# what a mask that is not made answers; strides are those of the values
ANSWERED = METADATA - {Tensor.stride, Tensor.is_contiguous}

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
        sees_before: whether layers that are not attention let a token use those before it that its
            mask does not show.

    Attributes:
        without_padding: whether a mask with padding was left out in the call.
    """

    def __init__(
        self, find: Callable[[], Tensor | None] | None = None, *, sees_before: bool = False
    ) -> None:
        self._find, self._used, self._sees_before = find, None, sees_before
        self.without_padding = False

    def __enter__(self) -> UsedTokens:
        self._before = getattr(_running, "used", None)
        _running.used = self
        return self

    def __exit__(self, *_: object) -> None:
        _running.used = self._before
        self._find = self._before = None  # holds the arguments of the call

    def of_mask(self, rows: int, mask: Tensor) -> Tensor | None:
        """Return (rows, T) bool for a mask (..., T) that is left out: the tokens that results of
        the call depend on then. None for all tokens.
        """
        used = self.of_batch(rows, mask)
        if used is None or not self._sees_before:
            return used
        return used.flip(-1).cummax(-1).values.flip(-1)

    def of_batch(self, rows: int, mask: Tensor) -> Tensor | None:
        """Return (rows, T) bool for a mask (..., T), True for the tokens whose results the call
        uses; None for all.
        """
        if self._find is not None:
            self._used, self._find = self._find(), None
        if self._used is None or tuple(self._used.shape) != (rows, mask.shape[-1]):
            return None
        return self._used.to(mask.device)


def used_tokens_of_call() -> UsedTokens | None:
    """Return the tokens whose results the patched model's call uses that this thread runs. None
    outside of such calls, where masks are not left out.
    """
    return getattr(_running, "used", None)


class DeferredMask(Tensor):
    """A mask (B, 1, T, T) bool, True where a query sees a key. What it describes is read when an
    attention first asks; its values are made, once, for an operation that needs them.
    """

    read: Callable[[], Segments | Tensor] | None  # until it is called; values of another kind
    described: Segments | None = None
    value: Tensor | None = None
    version: int  # of the value, when it was made

    @staticmethod
    def of(
        read: Callable[[], Segments | Tensor], rows: int, tokens: int, device: torch.device
    ) -> DeferredMask:
        """Return the mask of rows (B, T) that ``read`` returns, or the segments of."""
        mask: Any = Tensor._make_wrapper_subclass(
            DeferredMask, (rows, 1, tokens, tokens), dtype=torch.bool, device=device
        )
        mask.read = read
        return mask

    def segments(self) -> Segments | None:
        """Return what it describes; None for a mask of another kind, and where somebody has written
        to its values.
        """
        if self.read is not None:
            found, self.read = self.read(), None
            if isinstance(found, Segments):
                self.described = found
            else:
                self.value, self.version = found, found._version
        is_written = self.value is not None and self.value._version != self.version
        return None if is_written else self.described

    def real_mask(self) -> Tensor:
        """Return the values, made at the first call."""
        # selective checkpointing must not see the operations: it counts them
        unseen = _disable_current_modes() if in_tracing_mode() else nullcontext()
        with torch.inference_mode(False), unseen:
            segments = self.segments()
            if self.value is None and segments is not None:
                rows, _, tokens, _ = self.shape
                value = segment_mask(segments, rows, tokens, self.device)[:, None]
                self.value, self.version = value, value._version
        assert self.value is not None
        return self.value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ANSWERED:
                return func(*args, **kwargs)
            if func is Tensor.detach and args[0].value is None:
                return args[0]
            args, kwargs = tree_map_only(DeferredMask, DeferredMask.real_mask, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(DeferredMask, DeferredMask.real_mask, (args, kwargs or {}))
        return func(*args, **kwargs)


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
    segments, mask = None, attention_mask
    # one of another dtype is the caller's
    if (
        mask is not None
        and mask.dtype == torch.bool
        and not _needs_mask(query, key, mask, dropout, options)
    ):
        dtype, states = autocast_dtype(query.device.type, query.dtype), (query, key, value)
        if dtype is not None:  # as autocast has it for scaled_dot_product_attention
            states = query.to(dtype), key.to(dtype), value.to(dtype)
        if serves_flash_attention(*states):
            segments = _segments_of_call(mask, len(query))
        if segments is not None and not segments.is_causal:
            compute = segment_attention if segments.prefixes is None else prefix_attention
            return compute(*states, segments, scaling), None
    if segments is not None:  # whole rows: PyTorch may have a faster kernel
        mask, is_causal = None, True
    elif isinstance(mask, DeferredMask):
        mask = mask.real_mask()
    # a flag of all threads: another thread that compiles puts the warning off
    if not torch.compiler.is_compiling() and query.requires_grad and query.numel() > MOST_NUMBERS:
        _warn_of_length(query)
    how = dropout, scaling, is_causal
    return sdpa_attention_forward(module, query, key, value, mask, *how, **options)


@once_for_each_class
def own_attention_with_sinks(cls: Any) -> Any:
    """Return the attention function of a class's file, if it adds a sink to each head's softmax;
    None for any other. Transformers computes those with ``attn_implementation="eager"``.
    """
    own = inspect.unwrap(cls.forward).__globals__.get(EAGER)
    if own is None or EAGER not in names_of(cls) or not is_transformers(own):
        return None
    return own if "sinks" in own.__code__.co_names and _has_sinks(own) else None


def _has_sinks(own: Any) -> bool:
    """Return whether a function computes what sinks are, on a few numbers."""
    heads, tokens = 2, 3
    query, key, value = few_numbers(3, 1, heads, tokens, 4)
    layer: Any = nn.Module()
    layer.sinks = nn.Parameter(torch.tensor([0.5, -1.0]))
    layer.num_key_value_groups = 1
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]

    def with_sinks() -> list[Tensor]:
        scores = query @ key.transpose(2, 3) * 0.3 + mask
        y = (scores.softmax(-1) @ value).transpose(1, 2)
        return [add_sinks(y, scores.logsumexp(-1).transpose(1, 2), layer.sinks)[0]]

    return results_match(with_sinks, lambda: [own(layer, query, key, value, mask, scaling=0.3)[0]])


@once_for_each_class
def attention_with_sinks(own: Any) -> Any:
    """Return a function for attentions with sinks, in the place of that of their file."""

    @functools.wraps(own)
    def with_sinks(
        module: Any,
        query: Tensor,  # (B, num_heads, T, D)
        key: Tensor,  # (B, num_key_value_heads, T, D)
        value: Tensor,  # (B, num_key_value_heads, T, D)
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        def by_eager() -> tuple[Tensor, Tensor | None]:
            return own(module, query, key, value, attention_mask, scaling, dropout, **options)

        sinks = getattr(module, "sinks", None)
        # the configuration may ask for the weights
        if sinks is None or getattr(module.config, "output_attentions", False):
            return by_eager()
        if attention_mask is None or _needs_mask(query, key, attention_mask, dropout, options):
            return by_eager()
        dtype = autocast_dtype(query.device.type, query.dtype) or query.dtype
        states = query.to(dtype), key.to(dtype), value.to(dtype)
        segments = None
        if serves_flash_attention(*states):
            segments = _segments_of_call(attention_mask, len(query))
        if segments is None:
            return by_eager()
        return sink_attention(*states, sinks, segments, scaling), None

    return with_sinks


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
    if is_compiled_here():
        return True
    if (
        mask.dim() != 4
        or tuple(mask.shape[1:]) != (1, tokens, tokens)
        or len(mask) not in (1, len(query))
    ):
        return True
    if tokens != key.shape[2] or dropout or mask.is_inference() or mask.requires_grad:
        return True
    for name in options.keys() & UNSUPPORTED:
        if options[name] is not None and options[name] is not False:
            return True
    if nn.functional.scaled_dot_product_attention is not SDPA:
        return True
    if in_tracing_mode() or torch._C._is_tracing() or needs_own_code(query, key, mask):
        return True
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _segments_of_call(mask: Tensor, rows: int) -> Segments | None:
    """Return what a mask (rows or 1, 1, T, T) describes, None for a mask that is not left out.

    It is read once in a call of a patched model: layers share it, and checkpointing brings it again
    in the backward pass.
    """
    if isinstance(mask, DeferredMask):
        described = mask.segments() if len(mask) == rows else None
        if described is not None:
            return described
        mask = mask.real_mask()
    used = used_tokens_of_call()
    read_for, read_of, segments = _read.get(mask, (None, None, None))
    of = rows, mask._version
    runs_again = torch._C._current_graph_task_id() != -1
    is_same = read_for is used and read_of == of
    if is_same or (runs_again and read_of is not None and read_of[0] == rows):
        return segments
    if used is None:
        return None
    with torch.inference_mode(False):
        # eager's mask is added to scores: 0 where a query sees a key
        seen = mask if mask.dtype == torch.bool else mask == 0
        segments = segments_of(seen[:, 0], rows, used.of_mask(rows, mask))
        if mask.dtype != torch.bool:  # a bias of the caller's is no mask
            hides = mask <= torch.finfo(mask.dtype).min
            segments = segments if bool((seen | hides).all()) else None
    used.without_padding |= segments is not None and segments.has_padding
    _read[mask] = used, of, segments
    return segments
