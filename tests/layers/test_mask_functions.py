"""Masks of Transformers' mask functions: which are deferred, and what those then show."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import WARNINGS, Calls
from torch import Tensor
from transformers import masking_utils

from liger_patch.kernels.segments import segments_of
from liger_patch.layers.deferred_mask import DeferredMask, deferred_sdpa_mask

pytestmark = WARNINGS


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, served=True)


def ask(function: Callable[..., Any], mask_function: Callable[..., Any], **options: Any) -> Any:
    """Call ``sdpa_mask`` as Transformers does, with the arguments that its version has."""
    rows, tokens = options.pop("rows", 2), options.pop("tokens", 24)
    names = inspect.signature(masking_utils.sdpa_mask).parameters
    if "cache_position" in names:
        options["cache_position"] = torch.arange(tokens)
    else:
        options["q_length"], options["device"] = tokens, torch.device("cpu")
    given = {"batch_size": rows, "kv_length": tokens, "dtype": torch.bfloat16, **options}
    return function(mask_function=mask_function, **given)


def packed(base: Callable[..., Any], sequences: Tensor, positions: Tensor) -> Callable[..., Any]:
    """Return what Transformers makes for packed rows: its later versions use the positions."""
    make = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if make is not None:
        return make(base, positions, sequences)
    return masking_utils.and_masks(base, masking_utils.packed_sequence_mask_function(sequences))


BASES: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (masking_utils.causal_mask_function, None),
    "window": (masking_utils.sliding_window_causal_mask_function(7), 7),
    "chunks": (masking_utils.chunked_causal_mask_function(9, torch.tensor([0, 4])), 9),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("base", BASES)
def test_segments_are_those_of_the_mask(base: str, seed: int, calls: Calls) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(2, 24, generator=generator) < 0.2
    starts[:, 0] = True
    place = torch.arange(24).expand(2, -1)
    positions = place - torch.where(starts, place, 0).cummax(-1).values
    function, window = BASES[base]
    options: dict[str, Any] = {"local_size": window, "allow_is_causal_skip": True}
    if seed % 3 == 0:
        function = packed(function, starts.cumsum(-1), positions)
        options["allow_is_causal_skip"] = False
    if seed % 3 == 1:
        options["attention_mask"] = (place >= torch.tensor([[0], [4]])) & (place < 20)
    if seed % 3 == 2:
        options["attention_mask"] = torch.rand(2, 24, generator=generator) < 0.9
    kept = options.get("attention_mask", torch.ones(2, 24, dtype=torch.bool))
    own = ask(masking_utils.sdpa_mask, function, **options)
    mask = ask(lambda **kwargs: deferred_sdpa_mask(lambda: True, **kwargs), function, **options)
    assert type(mask) is DeferredMask
    for used in (None, kept):
        found, expected = mask.segments(2, used), segments_of(own[:, 0], 2, used)
        assert (found is None) == (expected is None)
        assert str(found) == str(expected)
    assert calls.made == 0
    assert torch.equal(mask, own)


CAUSAL = masking_utils.causal_mask_function
NO_INTERVALS = {
    "a sequence that goes on": (torch.tensor([[0] * 8 + [1] * 8 + [0] * 8]), torch.arange(24)),
    "positions that jump": (torch.zeros(1, 24).long(), torch.arange(24).roll(3)),
}


@pytest.mark.parametrize("kind", NO_INTERVALS)
def test_sequences_that_are_no_intervals_keep_their_mask(kind: str, calls: Calls) -> None:
    sequences, positions = NO_INTERVALS[kind]
    if kind == "positions that jump" and not hasattr(
        masking_utils, "packed_sequence_compatibility_function"
    ):
        pytest.skip("this version of Transformers does not use the positions")
    function = packed(CAUSAL, sequences, positions[None])
    options = {"rows": 1, "allow_is_causal_skip": False}
    mask = ask(lambda **kwargs: deferred_sdpa_mask(lambda: True, **kwargs), function, **options)
    assert mask.segments(1, None) is None
    own = ask(masking_utils.sdpa_mask, function, **options)
    assert segments_of(own[:, 0], 1) is None
    assert torch.equal(mask, own)


def _users(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


HALVES = masking_utils.packed_sequence_mask_function(torch.arange(24).expand(2, -1) // 12)
OTHERS: dict[str, dict[str, Any]] = {
    "a user's": {"mask_function": _users},
    "a user's, combined": {"mask_function": masking_utils.and_masks(CAUSAL, _users)},
    "a union": {"mask_function": masking_utils.or_masks(CAUSAL, _users)},
    "bidirectional": {"mask_function": masking_utils.bidirectional_mask_function},
    "packed twice": {"mask_function": masking_utils.and_masks(CAUSAL, HALVES, HALVES)},
    "by vmap": {"mask_function": CAUSAL, "use_vmap": True},
    "fewer queries": {"mask_function": CAUSAL, "kv_length": 30},
    "whoever gets it reads memory": {"mask_function": CAUSAL, "may_defer": False},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_masks_are_made_at_once(kind: str, calls: Calls) -> None:
    options = {"allow_is_causal_skip": False, "may_defer": True, **OTHERS[kind]}
    may_defer = options.pop("may_defer")
    mask = ask(lambda **kwargs: deferred_sdpa_mask(lambda: may_defer, **kwargs), **options)
    assert type(mask) is Tensor
    assert torch.equal(mask, ask(masking_utils.sdpa_mask, **options))


@pytest.mark.parametrize("attention_mask", [None, torch.ones(2, 24, dtype=torch.bool)])
def test_no_mask_stays_none(attention_mask: Tensor | None, calls: Calls) -> None:
    options = {"attention_mask": attention_mask}
    assert (
        ask(lambda **kwargs: deferred_sdpa_mask(lambda: True, **kwargs), CAUSAL, **options) is None
    )
