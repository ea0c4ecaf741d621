"""Gated feed-forward layers of Transformers' own classes on kernels, in 16 bits and in 32, with
dropout and without: results and every gradient against float64, no worse than the class's own.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_checks import as_of, check
from torch import Tensor, nn

from liger_patch.layers import mlp
from liger_patch.layers.checks import LAYER_NAMES
from liger_patch.layers.gates import GATES
from liger_patch.layers.mlp import mlp_class

HIDDEN, SIZE = 24, 40
CONFIGURATION = {  # every field that a class reads
    "d_ff": SIZE,
    "d_model": HIDDEN,
    "dense_act_fn": "gelu_new",
    "dropout_rate": 0.0,
    "hidden_act": "silu",
    "hidden_activation": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": SIZE,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "mlp_multipliers": (0.7, 1.3),
    "residual_dropout": 0.0,
    "shared_intermediate_size": SIZE,
}
FOLDERS = {
    "BeamMLP": "beam",
    "FalconH1MLP": "falcon_h1",
    "GraniteMoeHybridMLP": "granitemoehybrid",
    "GraniteMoeSharedMLP": "granitemoeshared",
    "Kosmos2_5VisionMlp": "kosmos2_5",
    "LongT5DenseGatedActDense": "longt5",
    "MT5DenseGatedActDense": "mt5",
    "ModernBertDecoderMLP": "modernbert_decoder",
    "PixtralMLP": "pixtral",
    "Pop2PianoDenseGatedActDense": "pop2piano",
    "SeedOssMLP": "seed_oss",
    "T5DenseGatedActDense": "t5",
    "T5Gemma2MLP": "t5gemma2",
    "T5GemmaMLP": "t5gemma",
    "UMT5DenseGatedActDense": "umt5",
}
DROPPING = {  # the attribute that says how much
    "Kosmos2_5VisionMlp": "dropout",
    "LongT5DenseGatedActDense": "dropout",
    "ModernBertDecoderMLP": "drop",
    "SeedOssMLP": "residual_dropout",
    "T5DenseGatedActDense": "dropout",
    "T5GemmaMLP": "dropout",
}


def own_layer(name: str, dropout: float = 0.0) -> Any:
    """A layer of the class in training mode, which drops this share of features."""
    folder = FOLDERS[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    layer = getattr(module, name)(SimpleNamespace(**CONFIGURATION)).train()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    attribute = DROPPING.get(name, "")
    for each in {attribute, "dropout", "residual_dropout"} & {*vars(layer), *layer._modules}:
        share = dropout if each == attribute else 0.0
        if isinstance(getattr(layer, each), nn.Dropout):
            getattr(layer, each).p = share
        else:
            setattr(layer, each, share)
    return layer


def on_kernels(layer: Any) -> Any:
    replacement = mlp_class(layer)
    assert LAYER_NAMES in vars(replacement)
    replaced = copy.copy(layer)
    replaced.__class__ = replacement
    return replaced


def hold_to_the_rule(layer: Any, dtype: torch.dtype) -> None:
    inputs = {name: value.detach().to(dtype) for name, value in layer.named_parameters()}
    inputs = {name.replace(".", "__"): value for name, value in inputs.items()}
    inputs["x"] = torch.randn(2, 5, HIDDEN).to(dtype)

    def result(module: Any, x: Tensor, **weights: Tensor) -> Tensor:
        torch.manual_seed(1)  # the same features are dropped
        named = {name.replace("__", "."): value for name, value in weights.items()}
        return torch.func.functional_call(module, named, (x,))

    replaced = on_kernels(layer)
    check(lambda **t: result(replaced, **t), lambda **t: result(layer, **t), inputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that ran, by name."""
    found: list[str] = []
    for name in ("run_gated", "run_gated_mlp"):
        function = getattr(mlp, name)

        def counted(
            *arguments: Any, _name: str = name, _own: Any = function, **options: Any
        ) -> Any:
            found.append(_name)
            return _own(*arguments, **options)

        monkeypatch.setattr(mlp, name, counted)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FOLDERS)
def test_layers_compute_what_their_class_does(
    name: str, dtype: torch.dtype, calls: list[str]
) -> None:
    layer = own_layer(name)
    on_kernels(layer)
    calls.clear()
    hold_to_the_rule(layer, dtype)
    assert set(calls) <= {"run_gated", "run_gated_mlp"}
    assert calls


@pytest.mark.parametrize("name", [each for each in FOLDERS if each != "FalconH1MLP"])
def test_plain_layers_are_one_function(name: str, calls: list[str]) -> None:
    layer = on_kernels(own_layer(name))
    calls.clear()
    layer(torch.randn(2, HIDDEN))
    assert calls == ["run_gated_mlp"]


@pytest.mark.parametrize("name", DROPPING)
def test_layers_that_drop_features_are_two_functions(name: str, calls: list[str]) -> None:
    layer = own_layer(name, dropout=0.5)
    replaced = on_kernels(layer)
    x = torch.randn(50, HIDDEN)
    calls.clear()
    results = []
    for each in (layer, replaced):
        torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results)
    assert calls == ["run_gated"]
    assert not torch.equal(replaced(x), results[1])  # other features
    hold_to_the_rule(layer, torch.float32)


def test_a_last_product_in_float32_takes_float32() -> None:
    """As T5's in a 16-bit model."""
    layer = own_layer("T5DenseGatedActDense").bfloat16()
    layer.wo.float()
    x = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    ours, eager = on_kernels(layer)(x), layer(x)
    assert ours.dtype == eager.dtype == torch.float32
    truth = copy.deepcopy(layer).double()(x.double())
    assert (ours - truth).abs().max() <= 2 * (eager - truth).abs().max()


def test_gate_and_up_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are as long as each other."""
    layer = own_layer("T5DenseGatedActDense")
    own = type(layer).forward

    def other_way_round(self: Any, hidden_states: Tensor) -> Tensor:
        other = copy.copy(self)
        other._modules = {**self._modules, "wi_0": self.wi_1, "wi_1": self.wi_0}
        return own(other, hidden_states)

    monkeypatch.setitem(
        GATES,
        mlp.names_of(type("Other", (), {"forward": other_way_round})),
        GATES[mlp.names_of(type(layer))],
    )
    monkeypatch.setattr(type(layer), "forward", as_of(own.__module__, other_way_round))
    assert mlp_class(layer) is None
