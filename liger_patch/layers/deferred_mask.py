"""Deferred masks: a tensor that stands for a mask (B, 1, T, T) and makes it lazily.

``sdpa_mask`` of Transformers combines functions that say whether a query sees a key. Of those known
here, a query sees the keys of an interval, or those that are no padding. ``segments`` asks them for
a few pairs of each token, and no mask is made. An operation that needs the mask's values makes it,
once, with Transformers' own function, and goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from liger_patch.deferred.ops import METADATA
from liger_patch.kernels.backend import autocast_dtype, in_tracing_mode
from liger_patch.kernels.segments import (
    Segments,
    may_serve_flash_attention,
    segments_of_intervals,
)

# what is answered without values; strides are those that Transformers gives the mask
ANSWERED = METADATA - {Tensor.stride, Tensor.is_contiguous}
# with one of these in its configuration, a model's attention needs its mask
NEED_MASKS = (
    "attn_logit_softcapping",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
)
# of a mask: fewer are made sooner than the host launches what finds out the segments. On an H200, a
# step with packed rows of 8 x 2048 tokens took 2 to 3 ms longer with a deferred mask
LEAST_NUMBERS = 2**27
AND, SEQUENCES, POSITIONS, INTERVAL = "and", "sequences", "positions", "interval"


def _known_functions() -> dict[CodeType, str]:
    """Return the kinds of Transformers' mask functions by their code, which all instances share."""
    made: dict[Callable[..., Any], str] = {
        masking_utils.and_masks(): AND,
        masking_utils.causal_mask_function: INTERVAL,
        masking_utils.sliding_window_overlay(1): INTERVAL,
        masking_utils.chunked_overlay(1, torch.zeros(0)): INTERVAL,
        masking_utils.packed_sequence_mask_function(torch.zeros(0)): SEQUENCES,
    }
    # of later versions
    positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if positions is not None:
        made[positions(masking_utils.causal_mask_function, torch.zeros(0))] = POSITIONS
    return {function.__code__: kind for function, kind in made.items()}


KNOWN = _known_functions()


def _parts(function: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the kind of each function that a mask function combines, None for one that is not
    known, and its variables.
    """
    code: Any = getattr(function, "__code__", None)
    kind = KNOWN.get(code)
    cells = () if kind is None else function.__closure__ or ()
    variables = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False))
    if kind != AND:
        yield kind, variables
    if "mask_function" in variables:
        yield from _parts(variables["mask_function"])
    for each in variables.get("mask_functions", ()):
        yield from _parts(each)


class DeferredMask(Tensor):
    """A mask (B, 1, T, T) of Transformers' ``sdpa_mask``, made when its values are first needed."""

    options: dict[str, Any]  # of the call of sdpa_mask
    padding: Tensor  # (B, 1, T, T), True where a key is none of padding: T numbers a row
    indices: tuple[Tensor, ...]  # of rows (B, 1), heads (1, 1), queries (T,) and keys (T,)
    value: Tensor | None
    version: int  # of the value, when it was made

    @classmethod
    def of_call(
        cls, options: dict[str, Any], padding: Tensor, indices: tuple[Tensor, ...]
    ) -> DeferredMask:
        mask: Any = Tensor._make_wrapper_subclass(
            cls, padding.shape, dtype=torch.bool, device=padding.device
        )
        mask.options, mask.padding, mask.value = options, padding, None
        rows, heads, queries, keys = indices
        mask.indices = rows.view(-1, 1), heads.view(1, 1), queries.flatten(), keys.flatten()
        return mask

    def segments(self, rows: int, used: Tensor | None) -> Segments | None:
        """Return what the mask describes, None for a mask of another kind.

        Args:
            rows: B.
            used: (B, T) bool, True for queries whose result is used; None for all.
        """
        is_real, window = self.padding[:, 0, 0], self.options.get("local_size")
        holds = self._has_intervals()
        return segments_of_intervals(self._sees, is_real, rows, window, used, holds=holds)

    def _has_intervals(self) -> Tensor | None:
        """Return whether the tokens of each sequence are neighbours whose positions rise by one, ()
        bool; None where nothing depends on it.
        """
        parts = [*_parts(self.options["mask_function"])]
        sequences = [of["packed_sequence_mask"] for kind, of in parts if kind == SEQUENCES]
        positions = [of["position_ids"] for kind, of in parts if kind == POSITIONS]
        if not sequences:
            return None
        steps = sequences[0].diff()
        holds = (steps >= 0).all()
        for each in positions:
            holds &= ((each.diff() == 1) | (steps != 0)).all()
        return holds

    def _sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        row, head, query, key = self.indices
        seen = self.options["mask_function"](row, head, query[queries], key[keys])
        return seen & self.padding[row, 0, 0, keys]

    def real_mask(self) -> Tensor:
        """Return the real mask, made at the first call."""
        if self.value is None:
            options = {**self.options, "allow_is_causal_skip": False}
            # selective checkpointing must not see the operations: it counts them
            unseen = _disable_current_modes() if in_tracing_mode() else nullcontext()
            with torch.inference_mode(False), unseen:
                value = sdpa_mask(**options)
            assert value is not None
            self.value, self.version = value, value._version
        return self.value

    def writes(self) -> int:
        """Return how often its values have been written to since they were made."""
        return 0 if self.value is None else self.value._version - self.version

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

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol):
        return self.real_mask().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.real_mask().__deepcopy__(memo)


def deferred_sdpa_mask(
    may_defer: Callable[[], bool], *arguments: Any, **options: Any
) -> Tensor | None:
    """Return Transformers' mask (B, 1, T, T), deferred where all functions that it combines are
    known, and where flash attention may leave it out.

    Args:
        may_defer: whether whoever gets the mask can do with a deferred one.
        arguments, options: of Transformers' ``sdpa_mask``.
    """
    if arguments or options.get("use_vmap") or not _may_be_left_out(options):
        return sdpa_mask(*arguments, **options)
    indices: list[tuple[Tensor, ...]] = []

    def sees_all(*of: Tensor) -> Tensor:
        indices.append(of)
        return torch.ones_like(of[-1], dtype=torch.bool)

    # whether there is a mask is Transformers' to say, and so is what it adds: padding
    padding = sdpa_mask(**{**options, "mask_function": sees_all})
    if padding is None:
        return None
    queries, keys = padding.shape[-2:]
    is_known = len(indices) == 1 and queries == keys > 1 and padding.stride(-2) == 0
    if is_known and may_defer():
        return DeferredMask.of_call(options, padding, *indices)
    return sdpa_mask(**{**options, "allow_is_causal_skip": False})


def _may_be_left_out(options: dict[str, Any]) -> bool:
    kinds = [kind for kind, _ in _parts(options.get("mask_function"))]
    if None in kinds or kinds.count(SEQUENCES) > 1:
        return False
    if POSITIONS in kinds and SEQUENCES not in kinds:
        return False
    if any(getattr(options.get("config"), name, None) for name in NEED_MASKS):
        return False
    # Transformers 5.0 gives the places of the queries instead
    places = options.get("cache_position")
    device = options.get("device") if places is None else places.device
    queries = options.get("q_length") if places is None else len(places)
    sizes: tuple[Any, ...] = options.get("batch_size"), queries, options.get("kv_length")
    if device is None or not all(sizes) or math.prod(sizes) < LEAST_NUMBERS:
        return False
    device, dtype = torch.device(device), options.get("dtype")
    return may_serve_flash_attention(device, autocast_dtype(device.type, dtype) or dtype)
