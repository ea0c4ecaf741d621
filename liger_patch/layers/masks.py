"""Derive the classes of backbones whose masks are deferred, each from its own class.

A backbone's own code runs, with others of Transformers' functions that make causal masks. These
run their own code too, with another table of mask functions: there, ``deferred_sdpa_mask`` stands
for Transformers' ``sdpa_mask``. That takes a function which says whether a query sees a key. Where
it sees an interval of keys, but for those of padding, a few pairs of each token describe the mask.

A mask function that is known is causal, of a sliding window, of chunks, or of packed sequences, or
combines such functions. With any other function, a query may see any keys.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from liger_patch.kernels.attention import may_serve_flash_attention
from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.graphs import in_tracing_mode, is_compiled_here, is_watched_by_dynamo
from liger_patch.kernels.segments import Segments, segments_of_intervals
from liger_patch.layers.checks import is_left_to_model, layers_of
from liger_patch.layers.masked_attention import DeferredMask, UsedTokens, used_tokens_of_call
from liger_patch.layers.other_globals import (
    OtherTable,
    decorated_again,
    names_in,
    with_other_globals,
)
from liger_patch.layers.unpadded import NEED_MASKS, takes_images_too, without_padding
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class

DEFERS_MASKS = "_liger_patch_defers_masks"  # attribute of such a class
TABLE = "ALL_MASK_ATTENTION_FUNCTIONS"  # the name by which these look a mask function up
MAKERS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",  # all of those that a model's types of layers need
)
OF_TYPES = "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING"  # the name of the last one's MAKERS by type
# of a mask: fewer are made sooner than the host launches what finds out the segments. On an H200, a
# step with packed rows of 8 x 2048 tokens took 2 to 3 ms longer with a deferred mask
LEAST_NUMBERS = 2**27

_running = threading.local()  # whether the backbone that this thread runs may defer masks


def mask_deferring_class(module: nn.Module) -> Any:
    """Return the class of a backbone whose masks are deferred, None for any other module. A
    backbone has Transformers' own code, makes masks or gives embeddings to a module that does, and
    has attentions on kernels.
    """
    original: Any = type(module)
    if not isinstance(module, PreTrainedModel) or not is_transformers(original.forward):
        return None
    if not any("attention" in layers_of(each) for each in module.modules()):
        return None
    is_backbone = _deferring(original.forward) is not None or takes_images_too(module)
    return deferring_masks(original) if is_backbone else None


@once_for_each_class
def deferring_masks(original: Any) -> type[nn.Module]:
    """Derive the class of a backbone whose masks are deferred in calls of a patched model."""
    own = original.forward
    deferring = _deferring(own) or own  # of a pickle: other functions may make masks here

    @functools.wraps(own)
    def forward(self, *arguments: Any, **options: Any) -> Any:
        x = arguments[0] if arguments else options.get("input_ids")
        x = options.get("inputs_embeds") if x is None else x
        used = used_tokens_of_call()
        if used is None or _needs_masks() or is_left_to_model(self, x):
            return own(self, *arguments, **options)
        before = getattr(_running, "may_defer", None)
        _running.may_defer = functools.cache(functools.partial(_may_defer, self))
        try:
            y = without_padding(self, deferring, arguments, options, used, _running.may_defer)
            return deferring(self, *arguments, **options) if y is None else y
        finally:
            _running.may_defer = before

    return derived_class(original, deferring_masks, forward=forward, **{DEFERS_MASKS: True})


def _deferring(function: Any) -> Any:
    """Return a backbone's forward, or one of the MAKERS that it calls, with deferred masks; None
    where it makes none by Transformers' functions.
    """
    own = inspect.unwrap(function)
    if not isinstance(own, types.FunctionType):
        return None
    module, names = own.__globals__, names_in(own.__code__)
    values = {
        name: _deferring(module[name])
        for name in MAKERS
        if name in names and module.get(name) is getattr(masking_utils, name)
    }
    if OF_TYPES in names and module is vars(masking_utils):
        values[OF_TYPES] = {each: _deferring(f) or f for each, f in module[OF_TYPES].items()}
    if TABLE in names and type(module.get(TABLE)) is AttentionMaskInterface:
        values[TABLE] = OtherTable(module[TABLE], {sdpa_mask: _sdpa_mask})
    values = {name: value for name, value in values.items() if value is not None}
    if not values:
        return None
    other, look_up = with_other_globals(own, values)

    @functools.wraps(own)
    def deferring(*arguments: Any, **options: Any) -> Any:
        look_up()
        return other(*arguments, **options)

    return decorated_again(function, deferring)


def _sdpa_mask(*arguments: Any, **options: Any) -> Any:
    used = used_tokens_of_call()
    if arguments or used is None:
        return sdpa_mask(*arguments, **options)
    return deferred_sdpa_mask(_running.may_defer, used, options)


def _needs_masks() -> bool:
    """Return whether masks cannot be left out where this thread is."""
    if is_compiled_here() or is_watched_by_dynamo() or torch.is_inference_mode_enabled():
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    is_traced = torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
    return is_traced or in_tracing_mode()


def _may_defer(backbone: nn.Module) -> bool:
    """Return whether deferred masks can be given to all modules of a backbone that may get one. A
    graph of torch.compile cannot take them: it reads their memory. An instance's own ``forward``
    may lead to such a graph.
    """
    modules: list[Any] = [backbone]
    takes_masks = functools.cache(_takes_masks)
    for module in modules:  # which grow
        cls = type(module)
        if not takes_masks(cls):
            continue
        # compiled functions have this attribute
        if hasattr(cls.forward, "_torchdynamo_orig_callable") or issubclass(cls, OptimizedModule):
            return False
        if module._compiled_call_impl is not None:
            return False
        if module is not backbone and "forward" in vars(module):
            return False
        if not layers_of(module):  # no module within is given the mask
            modules.extend(each for each in module._modules.values() if each is not None)
    return True


def _takes_masks(cls: Any) -> bool:
    """Return whether modules of a class may be given a mask: norms, linear and feed-forward layers
    are not.
    """
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return True
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any("mask" in name for name in names)


def deferred_sdpa_mask(
    may_defer: Callable[[], bool], used: UsedTokens, options: dict[str, Any]
) -> Tensor | None:
    """Return Transformers' mask (B, 1, T, T), deferred where it is large, may show intervals of
    keys, and flash attention may leave it out; None where Transformers makes none.

    Args:
        may_defer: whether whoever gets the mask can do with a deferred one.
        used: the tokens whose results the call uses.
        options: of Transformers' ``sdpa_mask``.
    """
    variables = None if options.get("use_vmap") else variables_of(options.get("mask_function"))
    if variables is None or not _may_be_left_out(options):
        return sdpa_mask(**options)
    indices: list[tuple[Tensor, ...]] = []

    def sees_all(*of: Tensor) -> Tensor:
        indices.append(of)
        return torch.ones_like(of[-1], dtype=torch.bool)

    # whether there is a mask is Transformers' to say, and so is what it adds: padding
    padding = sdpa_mask(**{**options, "mask_function": sees_all})
    if padding is None:
        return None
    rows, _, queries, keys = padding.shape
    is_known = len(indices) == 1 and queries == keys > 1 and padding.stride(-2) == 0
    if is_known and may_defer():
        read = functools.partial(_read, options, variables, padding, indices[0], used)
        return DeferredMask.of(read, rows, queries, padding.device)
    return sdpa_mask(**{**options, "allow_is_causal_skip": False})


def _read(
    options: dict[str, Any],
    variables: dict[str, Any],
    padding: Tensor,
    indices: tuple[Tensor, ...],
    used: UsedTokens,
) -> Segments | Tensor:
    """Return what a mask describes; a mask of another kind itself.

    Args:
        options: of the call of ``sdpa_mask``.
        variables: of its mask function.
        padding: (B, 1, T, T), True where a key is none of padding: T numbers a row.
        indices: of rows (B,), heads (1,), queries (T,) and keys (T,), of any number of dimensions.
    """
    row, head, query, key = (each.flatten() for each in indices)
    row, head = row[:, None], head[:, None]

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        seen = options["mask_function"](row, head, query[queries], key[keys])
        return seen & padding[row, 0, 0, keys]

    rows, window = len(padding), options.get("local_size")
    if window != 0:  # as Qwen2-MoE has it, whose layers do not read the mask
        how = rows, window, used.of_mask(rows, padding)
        holds = show_intervals(variables)
        segments = segments_of_intervals(sees, padding[:, 0, 0], *how, holds=holds)
        if segments is not None:
            used.without_padding |= segments.has_padding
            return segments
    mask = sdpa_mask(**{**options, "allow_is_causal_skip": False})
    assert mask is not None
    return mask


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


def _known_functions() -> frozenset[types.CodeType]:
    """Return the code of Transformers' functions, which all their instances share. One whose
    variables have other names than here is not known.
    """
    causal, none = masking_utils.causal_mask_function, torch.zeros(0)
    variables: dict[Any, set[str]] = {
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


def variables_of(mask_function: Any) -> dict[str, Any] | None:
    """Return the variables of a mask function and of those that it combines, by Transformers'
    names; None where a query may see no interval, whatever their values.
    """
    variables: dict[str, Any] = {}
    functions = [mask_function]
    for function in functions:  # which grow
        code: Any = getattr(function, "__code__", None)
        if code not in KNOWN:
            return None
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name == "mask_functions":
                functions.extend(cell.cell_contents)
            elif name == "mask_function":
                functions.append(cell.cell_contents)
            elif name in variables:  # Transformers never combines two of one kind
                return None
            else:
                variables[name] = cell.cell_contents
    if "position_ids" in variables and "packed_sequence_mask" not in variables:
        return None
    return variables


def show_intervals(variables: dict[str, Any]) -> Tensor | None:
    """Return whether each query sees an interval, () bool; None where no value decides it.

    It does where the tokens of each sequence are neighbours whose positions rise by one.

    Args:
        variables: of the mask function.
    """
    sequences, positions = variables.get("packed_sequence_mask"), variables.get("position_ids")
    if sequences is None:
        return None
    steps = sequences.diff()
    holds = (steps >= 0).all()
    if positions is not None:
        holds &= ((positions.diff() == 1) | (steps != 0)).all()
    return holds
