"""Norms of Transformers' own classes on kernels, in 16 bits and in 32: results and every gradient
against float64, no worse than the class's own.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from layer_checks import as_of, check
from torch import Tensor, nn

from liger_patch.layers.checks import LAYER_NAMES
from liger_patch.layers.norm import norm_class

SIZE, GROUP = 32, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "BambaRMSNormGated": {"group_size": GROUP},
    "FalconH1RMSNormGated": {"n_groups": SIZE // GROUP},
    "Zamba2RMSNormGated": {"group_size": GROUP},
}
T5_NORMS = {
    "Kosmos2_5LayerNorm": "kosmos2_5",
    "T5LayerNorm": "t5",
}
OTHERS = {
    "GptOssRMSNorm": "gpt_oss",
    "Gemma4RMSNorm": "gemma4",
    "Llama4TextRMSNorm": "llama4",
    "Qwen3NextRMSNorm": "qwen3_next",
    "DeepseekV4UnweightedRMSNorm": "deepseek_v4",
    "FalconMambaWeightlessRMSNorm": "falcon_mamba",
    "MuseGlimmerTextCenteredRMSNorm": "muse_glimmer",
}
WITH_GATE = {
    "BambaRMSNormGated": "bamba",
    "FalconH1RMSNormGated": "falcon_h1",
    "KimiLinearRMSNormGated": "kimi_linear",
    "Qwen3NextRMSNormGated": "qwen3_next",
    "Qwen3_5RMSNormGated": "qwen3_5",
    "Zamba2RMSNormGated": "zamba2",
}


def own_norm(name: str, folder: str, **options: Any) -> Any:
    """A norm of the class, whose weight is not 1."""
    module = f"transformers.models.{folder}.modeling_{folder}"
    cls = getattr(pytest.importorskip(module), name, None)
    if cls is None:
        pytest.skip(f"this version of {folder} has no {name}")
    options |= OPTIONS.get(name, {})
    known = inspect.signature(cls).parameters  # some versions have no groups
    norm = cls(
        *[SIZE] * ("Unweighted" not in name), **{n: options[n] for n in options if n in known}
    )
    if isinstance(getattr(norm, "weight", None), nn.Parameter):
        nn.init.normal_(norm.weight)
    return norm


def on_kernel(norm: Any) -> Any:
    replacement = norm_class(norm)
    assert LAYER_NAMES in vars(replacement)
    replaced = copy.copy(norm)
    replaced.__class__ = replacement
    return replaced


def hold_to_the_rule(norm: Any, names: list[str], dtype: torch.dtype, weight_dtype: Any) -> None:
    """Compare a norm with its own class: its inputs of these names, and its weight."""
    inputs = {name: (3 * torch.randn(2, 5, SIZE)).to(dtype) for name in names}
    if isinstance(getattr(norm, "weight", None), nn.Parameter):
        inputs["weight"] = norm.weight.detach().to(weight_dtype)

    def result(module: Any, tensors: dict[str, Tensor]) -> Tensor:
        weights = {"weight": tensors["weight"]} if "weight" in tensors else {}
        return torch.func.functional_call(module, weights, tuple(tensors[name] for name in names))

    replaced = on_kernel(norm)
    check(lambda **t: result(replaced, t), lambda **t: result(norm, t), inputs)


DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", T5_NORMS)
def test_norms_of_t5(name: str, weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Whose second product may be float32 in a 16-bit model: the norm has its weight's dtype."""
    hold_to_the_rule(own_norm(name, T5_NORMS[name]), ["x"], dtype, weight_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_norms_of_other_forms(name: str, dtype: torch.dtype) -> None:
    hold_to_the_rule(own_norm(name, OTHERS[name]), ["x"], dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_GATE)
def test_norms_with_a_gate(name: str, dtype: torch.dtype) -> None:
    hold_to_the_rule(own_norm(name, WITH_GATE[name]), ["x", "gate"], dtype, dtype)


@pytest.mark.parametrize("before", [False, True])
def test_a_norm_says_where_its_gate_is(before: bool) -> None:
    norm = own_norm("FalconH1RMSNormGated", "falcon_h1", norm_before_gate=before)
    hold_to_the_rule(norm, ["x", "gate"], torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("gate", [None, torch.ones(1, SIZE)], ids=["no gate", "one row"])
def test_a_norm_without_a_gate_of_its_shape_runs_its_own_code(gate: Tensor | None) -> None:
    norm, x = own_norm("BambaRMSNormGated", "bamba"), torch.randn(2, SIZE)
    assert torch.equal(on_kernel(norm)(x, gate), norm(x, gate))


def test_a_gate_with_another_activation_is_left_alone() -> None:
    norm = own_norm("Qwen3NextRMSNormGated", "qwen3_next")
    norm.activation = "tanh"
    assert norm_class(norm) is None


def test_a_gated_norm_that_computes_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As another version of Transformers might."""
    norm = own_norm("Qwen3NextRMSNormGated", "qwen3_next")
    own = type(norm).forward

    def in_front(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return own(self, hidden_states * gate, torch.full_like(gate, 4.0))

    monkeypatch.setattr(type(norm), "forward", as_of(own.__module__, in_front))
    assert norm_class(norm) is None


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
@pytest.mark.parametrize("name", ["BambaRMSNormGated", "Qwen3NextRMSNormGated"])
def test_a_compiled_norm_with_a_gate_is_one_graph(name: str) -> None:
    norm = on_kernel(own_norm(name, WITH_GATE[name]))
    x, gate = torch.randn(2, 3, SIZE, requires_grad=True), torch.randn(2, 3, SIZE)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)(x, gate)
    eager = norm(x, gate)
    torch.testing.assert_close(compiled, eager)
    gradients = (torch.autograd.grad(y.square().sum(), (x, norm.weight)) for y in (compiled, eager))
    torch.testing.assert_close(*gradients)
