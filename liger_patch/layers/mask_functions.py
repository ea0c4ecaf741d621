"""Tell whether a query sees the keys of one interval, with a mask function of Transformers.

A mask function says whether a query sees a key. Those known here are causal, of a sliding window,
of chunks, or of packed sequences, or combine such functions. With any other function, a query may
see any keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils


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
