"""Models with LoRA adapters: patched before or after they are wrapped, copied, saved, reverted, and
layers that run PEFT's own forward: those that are not plain, and those that are traced.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import Graphs
from exactness import assert_no_worse, assert_same_bits
from lora_models import (
    ALL,
    LAYER,
    MARKS,
    QWEN,
    Calls,
    adapted,
    assert_same,
    batch_of,
    beside,
    copies,
    first,
    lora_layers,
    pair,
    peft,
    training_step,
)
from tiny_models import tiny_model
from torch import Tensor, nn
from training_step import assert_right, call, step

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.layers.lora import not_plain
from liger_patch.layers.replace import count_layers

pytestmark = MARKS


@pytest.mark.parametrize("comes_first", ["patch", "adapters"])
@pytest.mark.parametrize(
    ("layers", "on_kernels"),
    [(True, True), (["lora"], True), (["gated", "lora"], True), (False, False), (["gated"], False)],
    ids=str,
)
def test_the_named_layers_are_on_kernels(
    layers: Any, on_kernels: bool, comes_first: str, calls: Calls
) -> None:
    """Whichever comes first, and whatever names came before. ["gated"] leaves LoRA layers alone."""
    eager = adapted(base=tiny_model().double())
    if comes_first == "patch":
        model = adapted(base=apply_patch(tiny_model().double(), layers=layers))
    else:
        model = apply_patch(apply_patch(copy.deepcopy(eager)), layers=layers)
    batch = batch_of(eager)
    assert ("14 lora" in str(patch_status(model))) == on_kernels  # also before the next call
    assert on_kernels or "lora" not in str(patch_status(model))
    assert not_plain(model) == {}
    assert_same(model, eager, batch)
    groups, by_peft = calls.of_step(model, batch)
    assert [each for group in groups for each in group] == list(ALL) * 2 * on_kernels
    assert len(by_peft) == 14 * (not on_kernels)
    counts = {name: count for name, count in count_layers(model).items() if count}
    assert counts.get("lora", 0) == 14 * on_kernels
    assert layers in (True, False) or counts.keys() <= {*layers}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_peft_that_somebody_wraps_runs(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(base=tiny_model().double())
    eager, cls = copy.deepcopy(model), peft.tuners.lora.Linear
    own, batch = cls.forward, batch_of(model)
    twice = functools.wraps(own)(lambda *args, **options: 2 * own(*args, **options))
    if when == "after":
        assert_same(apply_patch(model, layers=["lora"]), eager, batch)
    monkeypatch.setattr(cls, "forward", twice)
    assert_same(apply_patch(model, layers="lora") if when == "before" else model, eager, batch)
    monkeypatch.undo()
    assert_same(model, eager, batch)
    assert when == "before" or count_layers(model)["lora"] == 14


KINDS: dict[str, Any] = {"lora": copies, "experts": pair}  # of layers with adapters
of_both_kinds = pytest.mark.parametrize("kind", KINDS)


@of_both_kinds
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_on_kernels(how: str, kind: str) -> None:
    eager, model, batch = KINDS[kind]()
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    count = count_layers(model)[kind]
    revert_patch(model)
    assert count_layers(other)[kind] == count > 0
    assert_same(other, eager, batch)
    assert not_plain(other) == {}


@of_both_kinds
def test_saved_adapters_are_eagers(kind: str, tmp_path: Path) -> None:
    eager, model, batch = KINDS[kind]()
    base = tiny_model("llama" if kind == "lora" else QWEN).double()
    training_step(model, batch)
    assert list(model.state_dict()) == list(eager.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in eager.named_modules()]
    for each, folder in ((eager, tmp_path / "eager"), (model, tmp_path / "ours")):
        each.save_pretrained(folder)
    from safetensors.torch import load_file

    saved, expected = (
        load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "eager")
    )
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours", is_trainable=True).double()
    assert_same(loaded, eager, batch)
    assert_same(apply_patch(loaded), eager, batch)


@of_both_kinds
def test_everything_is_taken_back_and_a_model_beside_it_left_alone(kind: str) -> None:
    eager, model, batch = KINDS[kind]()
    training_step(model, batch)
    assert count_layers(eager)[kind] == 0
    classes = {name: type(m) for name, m in eager.named_modules()}
    assert sum(type(m) is not classes[name] for name, m in model.named_modules()) > 0
    revert_patch(model)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    truth, ours = training_step(eager, batch), training_step(model, batch)
    assert_same_bits(ours, truth)


STATES: dict[str, Callable[[Any], object]] = {  # without adapters, or with adapters that rest
    "merged": lambda model: model.merge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged for good": lambda model: model.merge_and_unload(),
}


@of_both_kinds
@pytest.mark.parametrize("state", STATES)
def test_states_without_gradients(state: str, kind: str) -> None:
    eager, model, batch = KINDS[kind]()
    training_step(model, batch)
    truth, ours = (call(STATES[state](each) or each, batch).loss for each in (eager, model))
    assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    if state == "merged for good":
        base = model.get_base_model()
        assert not lora_layers(base)
        assert count_layers(base)["lora"] == 0
        revert_patch(base)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_wrapper_around_a_wrapper_is_named() -> None:
    twice = adapted(base=adapted())
    with pytest.raises(TypeError, match="got PeftModelForCausalLM around a PeftModelForCausalLM"):
        apply_patch(twice)


def test_dtypes_are_in_the_status_and_a_warning_in_training_alone(calls: Calls) -> None:
    """Once for its adapters: pytest makes an error of any other."""
    model = apply_patch(adapted(dtype=torch.bfloat16))  # float32 adapters
    batch = batch_of(model)
    assert not_plain(model) == {}
    with torch.no_grad():
        model(**batch)
    model.eval()
    model(**batch)
    model.train()
    with model.disable_adapter():
        model(**batch)
    with pytest.warns(UserWarning, match="14 of the LoRA layers: weights of several") as caught:
        model(**batch)
    assert "liger_patch/patch" not in caught[0].filename  # but where the model is called
    groups, by_peft = calls.of_step(model, batch)
    assert (groups, len(by_peft)) == ([], 14)
    assert not_plain(model) == {"weights of several dtypes outside autocast": 14}
    training_step(model, batch, autocast=True)
    assert calls.taken(model) == (LAYER * 2, [])
    assert not_plain(model) == {}  # those of the last call
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    model.set_adapter("second")
    for name, p in model.named_parameters():
        if "second" in name:  # in the dtype of its base, by PEFT 0.18
            p.data = p.data.float()
    with pytest.warns(UserWarning, match="2 of the LoRA layers"):
        model(**batch)


class _Gathered(dict):
    """The parameters of a module under ZeRO-3, which gathers one that is read by its name."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} would be gathered")


def test_the_status_reads_no_weight_that_would_be_gathered() -> None:
    model = adapted()
    apply_patch(model)
    layers = lora_layers(model)
    for layer in layers.values():
        layer.base_layer.register_forward_pre_hook(lambda *_: None)
        vars(layer.base_layer)["_parameters"] = _Gathered(layer.base_layer._parameters)
    assert not_plain(model) == {"hooks within the layer": len(layers)}


def test_the_status_says_why_a_layer_was_not_asked() -> None:
    _, model, _ = copies()
    layer = first(model, "q_proj")
    torch.func.vmap(layer)(torch.randn(2, 3, 32).double())
    assert not_plain(model) == {"torch.func or a tensor subclass": 1}
    layer(torch.randn(2, 3, 32).double())
    assert not_plain(model) == {}


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
    eager, model, batch = beside(peft.get_peft_model(tiny_model().double(), config))
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
    eager, model, batch = beside(peft.get_peft_model(base, config).double())
    assert not_plain(model) == {"the base is a PackedLinear": 14}
    assert_same(model, eager, batch)
    assert not_plain(model) == {"the base is a PackedLinear": 14}


@of_the_compiler
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.slow
def test_a_compiled_model_runs_peft_s_own_layers() -> None:
    eager, model, batch = beside(adapted())
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
