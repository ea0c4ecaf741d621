"""Deferred masks: a tensor that stands for a mask (B, 1, T, T) and makes it lazily.

``sdpa_mask`` of Transformers takes a function that says whether a query sees a key. Where it sees
an interval of keys, but for those of padding, ``segments`` asks for a few pairs of each token, and
no mask is made. An operation that needs the mask's values makes it, once, with Transformers' own
function, and goes on with it. If a tensor that the mask is made of was changed in place before
that, it is an error.

A mask function that is known is causal, of a sliding window, of chunks, or of packed sequences, or
combines such functions. With any other function, a query may see any keys.
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
from liger_patch.kernels.attention import may_serve_flash_attention
from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.graphs import in_tracing_mode
from liger_patch.kernels.reference import segment_mask
from liger_patch.kernels.segments import Segments, segments_of_intervals

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


class DeferredMask(Tensor):
    """A mask (B, 1, T, T) of Transformers' ``sdpa_mask``, made when its values are first needed."""

    options: dict[str, Any]  # of the call of sdpa_mask
    tensors: dict[str, Tensor]  # that the mask is made of, by Transformers' names
    versions: dict[str, int]  # of these tensors, when the mask was deferred
    padding: Tensor  # (B, 1, T, T), True where a key is none of padding: T numbers a row
    indices: tuple[Tensor, ...]  # of rows (B, 1), heads (1, 1), queries (T,) and keys (T,)
    value: Tensor | None = None
    version: int  # of the value, when it was made
    described: Segments | None = None  # what it is made of instead, where that is known before

    @classmethod
    def of_call(
        cls,
        options: dict[str, Any],
        tensors: dict[str, Tensor],
        padding: Tensor,
        indices: tuple[Tensor, ...],
    ) -> DeferredMask:
        mask = cls._of_padding(padding)
        mask.options, mask.tensors = options, tensors
        mask.versions = {name: each._version for name, each in tensors.items()}
        rows, heads, queries, keys = indices
        mask.indices = rows.view(-1, 1), heads.view(1, 1), queries.flatten(), keys.flatten()
        return mask

    @classmethod
    def of_segments(cls, segments: Segments, tokens: int, device: torch.device) -> DeferredMask:
        """Return the mask (1, 1, T, T) that segments of one row describe."""
        is_real = torch.ones((), dtype=torch.bool, device=device)
        mask = cls._of_padding(is_real.expand(1, 1, tokens, tokens))
        mask.described, mask.tensors = segments, {}
        return mask

    @classmethod
    def _of_padding(cls, padding: Tensor) -> Any:
        mask: Any = Tensor._make_wrapper_subclass(
            cls, padding.shape, dtype=torch.bool, device=padding.device
        )
        mask.padding = padding
        return mask

    def segments(self, rows: int, used: Tensor | None) -> Segments | None:
        """Return what the mask describes, None for a mask of another kind.

        Args:
            rows: B.
            used: (B, T) bool, True for queries whose result is used; None for all.

        Raises:
            RuntimeError: a tensor that the mask is made of was changed in place.
        """
        self._check_unchanged()
        is_real, window = self.padding[:, 0, 0], self.options.get("local_size")
        holds = show_intervals(self.tensors)
        return segments_of_intervals(self._sees, is_real, rows, window, used, holds=holds)

    def _sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        row, head, query, key = self.indices
        seen = self.options["mask_function"](row, head, query[queries], key[keys])
        return seen & self.padding[row, 0, 0, keys]

    def real_mask(self) -> Tensor:
        """Return the real mask, made at the first call.

        Raises:
            RuntimeError: a tensor that the mask is made of was changed in place before that.
        """
        if self.value is None:
            self._check_unchanged()
            # selective checkpointing must not see the operations: it counts them
            unseen = _disable_current_modes() if in_tracing_mode() else nullcontext()
            with torch.inference_mode(False), unseen:
                value = self._make()
            self.value, self.version = value, value._version
        return self.value

    def _make(self) -> Tensor:
        if self.described is not None:
            return segment_mask(self.described, 1, self.shape[-1], self.device)[:, None]
        value = sdpa_mask(**{**self.options, "allow_is_causal_skip": False})
        assert value is not None
        return value

    def _check_unchanged(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor._version != self.versions[name]:
                raise RuntimeError(
                    f"an attention mask is read, but {name}, which it is made of, was changed in "
                    "place since the model made the mask. Read the mask before that, or give the "
                    f"model a copy: {name}.clone()"
                )

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


def deferred_sdpa_mask(
    may_defer: Callable[[], bool], *arguments: Any, **options: Any
) -> Tensor | None:
    """Return Transformers' mask (B, 1, T, T), deferred where it is large, shows intervals of keys,
    and flash attention may leave it out.

    Args:
        may_defer: whether whoever gets the mask can do with a deferred one.
        arguments, options: of Transformers' ``sdpa_mask``.
    """
    tensors = None if arguments else tensors_of(options.get("mask_function"))
    if tensors is None or options.get("use_vmap") or not _may_be_left_out(options):
        return sdpa_mask(*arguments, **options)
    if options.get("attention_mask") is not None:
        tensors["attention_mask"] = options["attention_mask"]
    if any(each.is_inference() for each in tensors.values()):  # writes to them are not counted
        return sdpa_mask(**options)
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
        return DeferredMask.of_call(options, tensors, padding, *indices)
    return sdpa_mask(**{**options, "allow_is_causal_skip": False})


def _may_be_left_out(options: dict[str, Any]) -> bool:
    """Return whether flash attention may compute what a call of ``sdpa_mask`` makes a mask for, and
    the mask is large.
    """
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


def _known_functions() -> frozenset[CodeType]:
    """Return the code of Transformers' functions, which all their instances share. One whose
    variables have other names than here is not known.
    """
    causal, none = masking_utils.causal_mask_function, torch.zeros(0)
    variables: dict[Callable[..., Any], set[str]] = {
        masking_utils.and_masks(): {"mask_functions"},
        causal: set(),
        masking_utils.sliding_window_overlay(1): {"sliding_window"},
        masking_utils.chunked_overlay(1, none): {"chunk_size", "left_padding"},
        masking_utils.packed_sequence_mask_function(none): {"packed_sequence_mask"},
    }
    # of later versions
    at_positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if at_positions is not None:
        variables[at_positions(causal, none)] = {"mask_function", "position_ids"}
    return frozenset(
        function.__code__
        for function, names in variables.items()
        if set(function.__code__.co_freevars) == names
    )


KNOWN = _known_functions()


def tensors_of(mask_function: Any) -> dict[str, Tensor] | None:
    """Return the tensors that a mask function reads, by Transformers' names for them; None where a
    query may see no interval, whatever their values.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in _variables(mask_function):
        if name is None or name in tensors:  # Transformers never combines two of one kind
            return None
        if isinstance(value, Tensor):
            tensors[name] = value
    if "position_ids" in tensors and "packed_sequence_mask" not in tensors:
        return None
    return tensors


def show_intervals(tensors: dict[str, Tensor]) -> Tensor | None:
    """Return whether each query sees an interval, () bool; None where no value decides it.

    It does where the tokens of each sequence are neighbours whose positions rise by one.

    Args:
        tensors: those that the mask function reads.
    """
    sequences, positions = tensors.get("packed_sequence_mask"), tensors.get("position_ids")
    if sequences is None:
        return None
    steps = sequences.diff()
    holds = (steps >= 0).all()
    if positions is not None:
        holds &= ((positions.diff() == 1) | (steps != 0)).all()
    return holds


def _variables(function: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield name and value of the variables of a mask function and of those that it combines; no
    name for a function that is not known.
    """
    code: Any = getattr(function, "__code__", None)
    if code not in KNOWN:
        yield None, function
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = cell.cell_contents
        yield name, value
        for each in {"mask_function": (value,), "mask_functions": value}.get(name, ()):
            yield from _variables(each)
