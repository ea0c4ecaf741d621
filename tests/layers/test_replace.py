"""Layers are put on kernels on one instance: which are chosen, which are left alone, and everything
can be undone.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import ROWS, tiny_batch, tiny_model
from torch.distributed.fsdp import FSDPModule
from training_step import step
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.layers import attention, masked_attention, mlp, norm, replace
from liger_patch.layers.replace import count_layers


def layers_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a module does: its class and its own forward."""
    return {name: (type(m), vars(m).get("forward")) for name, m in model.named_modules()}


@pytest.mark.parametrize(
    "names", [["rms_norm"], ["rotary"], ["attention"], ["gated"], ["gated", "rotary"], []]
)
def test_only_the_named_layers_are_replaced(names: list[str]) -> None:
    model = apply_patch(tiny_model(), layers=names)
    assert {name for name, count in count_layers(model).items() if count} == set(names)
    assert "layers" in str(patch_status(model))
    for name, count in count_layers(model).items():
        assert (f"{count} {name}" in str(patch_status(model))) == (name in names), name
    apply_patch(model, layers="rms_norm")
    assert {name for name, count in count_layers(model).items() if count} == {"rms_norm"}
    apply_patch(model, layers=False)
    assert not any(count_layers(model).values())
    apply_patch(model)
    assert {name for name, count in count_layers(model).items() if not count} == {
        "experts",
        "recurrent",
        "delta_net",
        "lora",
    }


def test_every_class_with_a_rule_is_looked_at() -> None:
    for name in attention.ATTENTIONS:
        known = tuple(replace.ENDINGS)
        assert name.endswith(known), f"{name} is never tried: add its ending to ENDINGS"


@pytest.mark.parametrize(
    "layers", ["norm", b"", ["rms_norm", "rope"], 3.0, ["rms_norm", ["rotary"]], {"gated": False}]
)
def test_an_unknown_layer_is_an_error_that_names_the_known_ones(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"layers must be .*rms_norm.*rotary.*gated.*got"):
        apply_patch(tiny_model(), layers=layers)


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize(
    ("model_type", "layers", "says"),
    [
        ("gpt_neo", ["rms_norm", "lora"], "GPTNeoForCausalLM has no rms_norm layer"),
        ("gpt_neo", ["attention", "lora"], "GPTNeoForCausalLM has no attention layer"),
        ("mixtral", ["gated"], "MixtralForCausalLM has no gated layer"),
        ("mixtral", ["gated", "rms_norm"], "MixtralForCausalLM has no gated layer"),
    ],
)
def test_a_layer_that_the_model_lacks_is_an_error_and_changes_nothing(
    model_type: str, layers: list[str], says: str, is_patched: bool
) -> None:
    model = tiny_model(model_type)
    if is_patched:
        apply_patch(model)
    counts = count_layers(model)
    with pytest.raises(ValueError, match=says):
        apply_patch(model, layers=layers)
    assert patch_status(model).patched == is_patched
    assert count_layers(model) == counts


def test_layers_that_are_all_hooked_are_left_alone() -> None:
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model()
    for module in model.modules():
        accelerate_hooks.add_hook_to_module(module, accelerate_hooks.ModelHook())
    with pytest.raises(ValueError, match="has no gated and no rms_norm and no rotary layer"):
        apply_patch(model, layers=["gated", "rms_norm", "rotary"])
    assert not any(count_layers(apply_patch(model)).values())


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "qwen3_next", "t5gemma"])
def test_units_of_fsdp2_are_replaced_as_the_classes_within(model_type: str) -> None:
    """``fully_shard`` makes a class for each unit: of the last norm too, in Transformers' plan."""
    expected = count_layers(apply_patch(tiny_model(model_type)))
    model = tiny_model(model_type)
    for module in model.modules():
        if replace._layers(module):
            cls = type(module)
            module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    batch = tiny_batch(model)
    truth = model(**batch).loss
    assert count_layers(apply_patch(model)) == expected
    torch.testing.assert_close(model(**batch).loss, truth)


def test_what_others_have_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger-Kernel and Unsloth replace functions of Transformers for all models of a kind."""
    from transformers.models.llama import modeling_llama as llama

    model, batch, calls = tiny_model(), tiny_batch(tiny_model()), []
    norm, gate = llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward
    counted = functools.wraps(norm)(lambda self, x: calls.append(1) or norm(self, x))
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", counted)  # it computes the same
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: 2 * gate(self, x))
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, *tables, **options: (q, k))
    eager = step(model, batch)
    with pytest.raises(ValueError, match="no gated and no rms_norm and no rotary layer"):
        apply_patch(model, layers=["gated", "rms_norm", "rotary"])
    says = pytest.warns(UserWarning, match="no rotary layer of .* or another library changes them")
    with nullcontext() if registry.missing() else says:  # nothing is promised on an older one
        apply_patch(model)
    calls.clear()
    torch.testing.assert_close(step(model, batch), eager)
    assert len(calls) == 5


@pytest.mark.parametrize("method", ["forward", "_norm"])
def test_a_subclass_with_the_same_name_is_left_alone(method: str) -> None:
    """A probe finds no difference."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    model, own, calls = tiny_model(), getattr(Gemma3RMSNorm, method), []
    counted = {method: lambda self, x: calls.append(1) or own(self, x)}
    cls = type("Gemma3RMSNorm", (Gemma3RMSNorm,), counted)
    model.model.norm = cls(model.config.hidden_size)
    apply_patch(model, layers=True)
    assert type(model.model.norm) is cls
    assert count_layers(model)["rms_norm"] == 4
    calls.clear()
    model(**tiny_batch(model))
    assert calls == [1]


def test_layers_of_transformers_with_more_parameters_are_left_alone() -> None:
    """A version to come may add one that begins as zero, which a probe cannot see."""
    model = tiny_model()
    model.model.norm.register_parameter("log_scale", torch.nn.Parameter(torch.zeros(())))
    model.model.layers[0].mlp.register_parameter("shift", torch.nn.Parameter(torch.zeros(())))
    counts = count_layers(apply_patch(model, layers=True))
    assert (counts["rms_norm"], counts["gated"]) == (4, 1)


@pytest.mark.parametrize("way_back", ["revert", "patch_again", "hooks_first"])
def test_hooks_of_accelerate_since_the_patch_hold_no_kernel(
    way_back: str, record: Callable[..., list[Any]]
) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = apply_patch(tiny_model(), layers=True)
    for module in model.model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    if way_back == "hooks_first":
        hooks.remove_hook_from_submodules(model.model)
    if way_back == "patch_again":
        apply_patch(model, layers=False)
    else:
        revert_patch(model)
    kernels: list[tuple[Any, str]] = [
        (norm, "run_rms_norm"),
        (attention, "needs_own_code"),
        (masked_attention, "is_compiled_here"),
        (mlp, "run_gated"),
        (mlp, "run_gated_mlp"),
    ]
    calls = [record(module, name) for module, name in kernels]
    model(**tiny_batch(model))
    assert not any(calls)


@pytest.mark.parametrize("hooked", ["all", "one layer"])
def test_layers_that_hooks_hold_since_stay_on_kernels(hooked: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = apply_patch(tiny_model(), layers=True)
    counts, batch = count_layers(model), tiny_batch(model)
    expected = model(**batch).loss
    for module in (model.model if hooked == "all" else model.model.layers[0]).modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    apply_patch(model, layers=True, chunk_mib=1)
    assert count_layers(model) == counts
    assert model(**batch).loss == expected
    apply_patch(model, layers=["rotary"])
    assert count_layers(model) == dict.fromkeys(counts, 0) | {"rotary": counts["rotary"]}


@pytest.mark.parametrize("layers", [True, ["rms_norm", "attention", "gated"]], ids=str)
@pytest.mark.parametrize("kind", ["Model", "RMSNorm", "Attention", "MLP"])
def test_a_forward_that_is_replaced_since_runs(
    kind: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, eager = apply_patch(tiny_model(), layers=layers), tiny_model()
    batch, before = tiny_batch(model), layers_of(model)
    model(**batch)
    owner: Any = getattr(transformers.models.llama.modeling_llama, f"Llama{kind}")
    own, calls = owner.forward, []

    @functools.wraps(own)  # as decorators do: it has Transformers' name then
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, "forward", counted)
    for _ in range(2):
        eager(**batch)
        expected = len(calls)
        model(**batch)
        assert len(calls) == 2 * expected > 0
        calls.clear()
    monkeypatch.undo()
    model(**batch)
    assert not calls
    assert layers_of(model) == before


def test_a_layer_of_another_class_since_is_not_reverted_silently() -> None:
    model = apply_patch(tiny_model(), layers=True)
    counts, norm = count_layers(model), model.model.norm
    norm.__class__ = type("Sharded", (type(norm),), {})
    for change in (revert_patch, apply_patch):
        with pytest.raises(RuntimeError, match="was given another class after apply_patch"):
            change(model)
        assert patch_status(model).patched
        assert count_layers(model) == counts


@pytest.mark.parametrize("way", ["copy", "pickle"])
@pytest.mark.parametrize("model_type", sorted({"llama", "qwen3_next"} & ROWS.keys()))
def test_a_copy_has_layers_of_its_own(model_type: str, way: str) -> None:
    model = apply_patch(tiny_model(model_type), layers=True)
    batch = tiny_batch(model)
    other = copy.deepcopy(model) if way == "copy" else pickle.loads(pickle.dumps(model))
    counts = count_layers(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    fresh = tiny_model(model_type)
    fresh.load_state_dict(other.state_dict())
    revert_patch(model)
    assert count_layers(other) == counts
    torch.testing.assert_close(other(**batch).loss, fresh(**batch).loss)


@pytest.mark.parametrize(
    ("model_type", "norms", "rotary", "attentions", "gated"),
    [
        ("llama", 5, 2, 2, 2),
        ("gemma2", 9, 2, 2, 2),
        ("gemma3_text", 13, 2, 2, 2),
        ("qwen3", 9, 2, 2, 2),
        ("mixtral", 5, 2, 2, 0),  # all its feed-forward layers are experts
        ("phi3", 5, 2, 2, 2),
        ("glm4", 9, 2, 2, 2),
        ("qwen2_5_vl", 8, 3, 2, 3),  # attention of images is not causal
        ("llama4_text", 7, 2, 2, 2),  # the shared experts' gates
        ("cohere", 0, 2, 2, 2),  # its norm subtracts the mean
        ("phi", 0, 2, 2, 0),
        ("gpt_neo", 0, 0, 0, 0),
    ],
)
def test_all_layers_of_a_model_are_replaced(
    model_type: str, norms: int, rotary: int, attentions: int, gated: int
) -> None:
    model = apply_patch(tiny_model(model_type), layers=True)
    experts = 2 if model_type == "mixtral" else 0
    if model_type == "qwen2_5_vl" and Version(transformers.__version__) < Version("5.17"):
        rotary = 1  # of images: that of text takes sections of positions there
    expected = {"rms_norm": norms, "rotary": rotary, "attention": attentions, "gated": gated}
    counts = count_layers(model)
    assert counts == dict.fromkeys(counts, 0) | expected | {"experts": experts}
