"""Which norms are replaced: those that compute what the kernel of their class does. Results and
every gradient, in 16 bits and in 32, are no worse than the class's own against float64.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_checks import as_of, check
from tiny_models import tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_patch import apply_patch
from liger_patch.layers.checks import LAYER_NAMES, results_match
from liger_patch.layers.norm import PROBED, norm_class
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


def normed(self: Any, x: Tensor) -> Tensor:
    """In float32, without the weight."""
    return rms_norm(x.float(), x.shape[-1:], None, self.variance_epsilon).to(x.dtype)


def of_groups(self: Any, x: Tensor) -> Tensor:
    """Of as many features as a norm is tried on."""
    return self.weight * normed(self, x.unflatten(-1, (-1, PROBED))).flatten(-2)


OTHER_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "another epsilon": lambda self, x: self.weight * rms_norm(x, x.shape[-1:], None, 1e-3),
    "another dtype": lambda self, x: LLAMA_NORM_FORWARD(self, x).to(torch.float32),
    "more arguments": lambda self, x, gate: LLAMA_NORM_FORWARD(self, x) * gate,
    "its own size": lambda self, x: rms_norm(x, (self.hidden_size,), self.weight, 1e-6),
    "groups": of_groups,
    "limited": lambda self, x: LLAMA_NORM_FORWARD(self, x.clamp(-10.0, 10.0)),
    "limited weight": lambda self, x: self.weight.clamp(max=4.0) * normed(self, x),
    "positive weight": lambda self, x: self.weight.abs() * normed(self, x),
}


@pytest.mark.filterwarnings("ignore:liger_patch runs no rms_norm layer")
@pytest.mark.parametrize("forward", OTHER_FORWARDS.values(), ids=OTHER_FORWARDS)
def test_a_norm_that_computes_something_else_is_left_alone(
    forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of Transformers might."""
    model = tiny_model()
    original = type(model.model.norm)
    monkeypatch.setattr(original, "forward", as_of(original.__module__, forward))
    if forward is of_groups:
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
    assert count_layers(apply_patch(model, layers=True))["rms_norm"] == len(norms)


SIZE, GROUP = 32, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "BambaRMSNormGated": {"group_size": GROUP},
    "FalconH1RMSNormGated": {"n_groups": SIZE // GROUP},
    "Zamba2RMSNormGated": {"group_size": GROUP},
}
T5_NORMS = {"Kosmos2_5LayerNorm": "kosmos2_5", "T5LayerNorm": "t5"}
NORMS = {
    "GptOssRMSNorm": "gpt_oss",
    "Gemma4RMSNorm": "gemma4",
    "Llama4TextRMSNorm": "llama4",
    "Qwen3NextRMSNorm": "qwen3_next",
    "DeepseekV4UnweightedRMSNorm": "deepseek_v4",
    "FalconMambaWeightlessRMSNorm": "falcon_mamba",
    "MuseGlimmerTextCenteredRMSNorm": "muse_glimmer",
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


def hold_to_the_rule(norm: Any, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Compare a norm with its own class: its inputs, and its weight."""
    names = ["x", "gate"] if "Gated" in type(norm).__name__ else ["x"]
    inputs = {name: (3 * torch.randn(2, 5, SIZE)).to(dtype) for name in names}
    if isinstance(getattr(norm, "weight", None), nn.Parameter):
        inputs["weight"] = norm.weight.detach().to(weight_dtype)

    def result(module: Any, tensors: dict[str, Tensor]) -> Tensor:
        weights = {"weight": tensors["weight"]} if "weight" in tensors else {}
        return torch.func.functional_call(module, weights, tuple(tensors[name] for name in names))

    replaced = on_kernel(norm)
    check(lambda **t: result(replaced, t), lambda **t: result(norm, t), inputs)


DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("name", "dtype", "weight_dtype"),
    # T5's second product may be float32 in a 16-bit model: the norm has its weight's dtype
    [*itertools.product(T5_NORMS, DTYPES, DTYPES), *((n, d, d) for n in NORMS for d in DTYPES)],
    ids=str,
)
def test_norms_of_classes(name: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    hold_to_the_rule(own_norm(name, (NORMS | T5_NORMS)[name]), dtype, weight_dtype)


@pytest.mark.parametrize("before", [False, True])
def test_a_norm_says_where_its_gate_is(before: bool) -> None:
    norm = own_norm("FalconH1RMSNormGated", "falcon_h1", norm_before_gate=before)
    hold_to_the_rule(norm, torch.bfloat16, torch.bfloat16)


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
    norm = on_kernel(own_norm(name, NORMS[name]))
    x, gate = torch.randn(2, 3, SIZE, requires_grad=True), torch.randn(2, 3, SIZE)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)(x, gate)
    eager = norm(x, gate)
    torch.testing.assert_close(compiled, eager)
    gradients = (torch.autograd.grad(y.square().sum(), (x, norm.weight)) for y in (compiled, eager))
    torch.testing.assert_close(*gradients)
