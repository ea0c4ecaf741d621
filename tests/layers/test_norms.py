"""Which norms are replaced: those that compute what the kernel of their class does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_checks import as_of
from tiny_models import tiny_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_patch import apply_patch
from liger_patch.layers.checks import results_match
from liger_patch.layers.norm import PROBED
from liger_patch.layers.replace import count_layers

LLAMA_NORM_FORWARD = LlamaRMSNorm.forward


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_models_without_numbers_get_kernels(mode: Callable[[], Any]) -> None:
    model = tiny_model()
    with mode():
        empty = type(model)(model.config)
        counts = count_layers(apply_patch(empty, layers=True))
    assert counts == count_layers(apply_patch(model, layers=True))


def test_layers_are_tried_without_autocast() -> None:
    """In which a product has another dtype than a sum of products."""
    x = torch.linspace(-1.0, 2.0, 6).view(2, 3)
    with torch.autocast("cpu"):
        assert results_match(lambda: [x @ x.mT], lambda: [(x[:, None] * x).sum(-1)])


def another_result(self: Any, x: Tensor) -> Tensor:
    return self.weight * torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-3)


def another_dtype(self: Any, x: Tensor) -> Tensor:
    return LLAMA_NORM_FORWARD(self, x).to(x.dtype)


def more_arguments(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return LLAMA_NORM_FORWARD(self, x) * gate


def its_own_size(self: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)


def groups(self: Any, x: Tensor) -> Tensor:
    """Of as many features as a norm is tried on."""
    grouped = x.unflatten(-1, (-1, PROBED))
    normed = torch.nn.functional.rms_norm(grouped.float(), (PROBED,), None, self.variance_epsilon)
    return self.weight * normed.to(x.dtype).flatten(-2)


OTHER_FORWARDS = [another_result, another_dtype, more_arguments, its_own_size, groups]


@pytest.mark.parametrize("forward", OTHER_FORWARDS)
def test_a_norm_that_computes_something_else_is_left_alone(
    forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of Transformers might."""
    model = tiny_model()
    original = type(model.model.norm)
    monkeypatch.setattr(forward, "__module__", original.forward.__module__)
    monkeypatch.setattr(original, "forward", forward)
    if forward is groups:
        monkeypatch.setattr(original, "group_size", PROBED, raising=False)
    counts = count_layers(apply_patch(model, layers=True))
    assert counts["rms_norm"] == 0
    assert [counts[n] for n in ("rotary", "attention", "gated")] == [2] * 3
    assert counts["lora"] == 0


def test_a_norm_of_another_configuration_is_probed_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return LLAMA_NORM_FORWARD(self, x) * getattr(self, "scale", 1.0)

    monkeypatch.setattr(LlamaRMSNorm, "forward", as_of(LlamaRMSNorm.__module__, scaled))
    model = tiny_model()
    model.model.layers[0].input_layernorm.scale = 1.0
    model.model.layers[1].input_layernorm.scale = 2.0
    assert count_layers(apply_patch(model, layers=True))["rms_norm"] == 4
    assert type(model.model.layers[1].input_layernorm) is LlamaRMSNorm


def test_a_norm_whose_weight_is_no_parameter_has_a_kernel() -> None:
    """As FSDP holds it, without use_orig_params."""
    model = tiny_model()
    last = model.model.norm
    weight = last.weight.detach()
    del last.weight
    last.weight = weight
    assert count_layers(apply_patch(model, layers=True))["rms_norm"] == 5
    assert last.weight is weight


def test_norms_without_a_weight_are_replaced_too() -> None:
    model = tiny_model("gemma3n_text")
    norms = [m for m in model.modules() if type(m).__name__ == "Gemma3nRMSNorm"]
    assert not all(m.with_scale for m in norms)
    counts = count_layers(apply_patch(model, layers=True))
    assert counts["rms_norm"] == len(norms)
    assert [counts[n] for n in ("rotary", "attention", "gated")] == [4] * 3
    assert counts["lora"] == 0
