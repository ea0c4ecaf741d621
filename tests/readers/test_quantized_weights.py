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


class Squares:
    """A reader of weights that are squared."""

    layers = (nn.Linear,)

    @classmethod
    def serves(cls, layer: type, weight: type) -> bool:
        return layer in cls.layers and weight is nn.Parameter

    @staticmethod
    def read(layer: nn.Linear, dtype: torch.dtype) -> quantized_weights.LayerWeight | str:
        class Square(quantized_weights.LayerWeight):
            def dequantized(self) -> torch.Tensor:
                return layer.weight.detach().square()

        if not layer.weight.any():
            return "nothing to square"
        return Square(layer.weight.device, layer.weight.shape, dtype)


def test_a_new_format_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized_weights.READERS, "squares", "torch")
    monkeypatch.setitem(sys.modules, "squares", Squares)  # pyright: ignore
    layer = nn.Linear(3, 2)
    assert reader_of(layer) is Squares
    assert reader_of(nn.LayerNorm(3)) is None
    weight = quantized_weight(layer, torch.float32)
    assert weight is not None
    assert torch.equal(weight.dequantized(), layer.weight**2)
    nn.init.zeros_(layer.weight)
    assert quantized_weight(layer, torch.float32) is None
