"""Which reader serves a layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from liger_patch.readers import quantized_weights
from liger_patch.readers.quantized_weights import quantized_weight, reader_of


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Iterator[None]:
    quantized_weights._reader.cache_clear()
    yield
    quantized_weights._reader.cache_clear()


def test_plain_layers_have_none() -> None:
    for layer in (nn.Linear(4, 4), nn.LayerNorm(4), nn.Identity()):
        assert reader_of(layer) is None
        assert quantized_weight(layer, torch.float32) is None


@pytest.mark.parametrize("forbidden", [False, True])
def test_a_library_that_is_not_loaded_is_not_imported(
    forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, library in quantized_weights.READERS.items():
        monkeypatch.setitem(sys.modules, library, None)  # pyright: ignore
        if not forbidden:
            monkeypatch.delitem(sys.modules, library)
        monkeypatch.setitem(sys.modules, name, None)  # an import fails
    assert reader_of(nn.Linear(4, 4)) is None
