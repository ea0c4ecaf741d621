"""LoRA layers that run PEFT's own forward: those that are not plain, and those that are traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiled_graphs import Graphs
from exactness import assert_no_worse
from lora_models import (
    ALL,
    MARKS,
    Calls,
    adapted,
    assert_same,
    batch_of,
    copies,
    first,
    peft,
    training_step,
)
from tiny_models import tiny_model
from torch import Tensor, nn
from training_step import assert_right, step

from liger_patch import apply_patch, patch_status
from liger_patch.layers.lora import not_plain
from liger_patch.layers.replace import count_layers

pytestmark = MARKS
of_the_compiler = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


# class, options, layers on kernels, the others
OTHERS: dict[str, tuple[str, dict[str, Any], int, dict[str, int]]] = {
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        0,
        {"Linear (ia3)": 4},
    ),
    "VeRA": ("VeraConfig", {"r": 4, "init_weights": False}, 0, {"Linear (vera)": 2}),
    "LoHa": ("LoHaConfig", {"r": 4, "init_weights": False}, 0, {"Linear (loha)": 2}),
    "saved modules": (
        "LoraConfig",
        {"init_lora_weights": False, "modules_to_save": ["lm_head", "up_proj"]},
        2,
        {},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tuners_and_modules(name: str) -> None:
    """Are left alone and counted, the head's adapter to the head."""
    kind, options, counted, others = OTHERS[name]
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})
    torch.manual_seed(1)
    eager = peft.get_peft_model(tiny_model().double(), config)
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert count_layers(model)["lora"] == counted
    assert not_plain(model) == others
    for reason, count in others.items():
        assert f"{count} in PEFT's own forward: {reason}" in str(patch_status(model))
    truth, ours = (step(each.train(), batch) for each in (eager, model))
    assert any(value is not None and value.any() for name, value in truth.items() if name != "loss")
    assert_no_worse(ours, truth, truth, torch.float32)
    assert patch_status(model).fused


class PackedLinear(nn.Module):
    """A quantized layer of another library: it has no ``weight``, and no ``bias``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().max() / 127
        self.register_buffer("qweight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.scale)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_bases_without_a_weight() -> None:
    base = tiny_model()
    for name, layer in list(base.named_modules()):
        if isinstance(layer, nn.Linear):
            base.set_submodule(name, PackedLinear(layer))
    config = peft.LoraConfig(target_modules=[*ALL, "lm_head"], init_lora_weights=False)
    config._register_custom_module({PackedLinear: peft.tuners.lora.Linear})
    torch.manual_seed(1)
    eager: Any = peft.get_peft_model(base, config).double()
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert not_plain(model) == {"the base is a PackedLinear": 14}
    assert_same(model, eager, batch)
    assert not_plain(model) == {"the base is a PackedLinear": 14}


@of_the_compiler
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.slow
def test_a_compiled_model_runs_peft_s_own_layers() -> None:
    eager = adapted()
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    wide = copy.deepcopy(eager).double()
    graphs = Graphs("aot_eager")
    loss = torch.compile(model, backend=graphs)(**batch).loss
    loss.backward()
    # of two layers, all seven products of bases and those of their adapters, in one graph
    assert max(graphs.linears) == sum(graphs.linears) == 2 * 7 * 3
    ours = {n: p.grad for n, p in model.named_parameters() if "lora_" in n}
    assert_right(
        {"loss": loss.detach(), **ours}, training_step(eager, batch), training_step(wide, batch)
    )


@of_the_compiler
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(("how", "name"), [("compile", "mlp"), ("jit", "mlp"), ("jit", "o_proj")])
def test_a_traced_layer_is_peft_s_own_code(how: str, name: str, calls: Calls) -> None:
    """And one graph."""
    _, model, _ = copies()
    layer, x, example = first(model, name), *torch.randn(2, 2, 3, 32).double()
    expected = layer(x)
    calls.clear()
    if how == "compile":
        traced: Any = torch.compile(layer, backend="eager", fullgraph=True)
    else:
        traced = torch.jit.trace(nn.Sequential(layer), example, check_trace=False)
    torch.testing.assert_close(traced(x), expected)
    groups, _ = calls.taken(model)
    assert groups == []


@pytest.mark.parametrize("preset", ["W4A16", "FP8_DYNAMIC"])
def test_the_forwards_of_compressed_tensors(preset: str) -> None:
    ct = pytest.importorskip("compressed_tensors.quantization")
    base = tiny_model()
    scheme = ct.preset_name_to_scheme(preset, ["Linear"])
    config = ct.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 16
    ct.apply_quantization_config(base, config)
    model = apply_patch(adapted(base=base))
    said = "compressed-tensors, without CompressedTensorsConfig(dequantize=True)"
    assert not_plain(model) == {said: 14}
