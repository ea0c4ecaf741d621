"""Layers are put on kernels on one instance: which are chosen, which are left alone, and everything
can be undone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import (
    call,
    step,
    tell_apart,
)
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.layers import masked_attention, mlp, norm, rotations
from liger_patch.layers.replace import LAYERS, count_layers
from liger_patch.layers.rotations import ROTATIONS
from liger_patch.layers.tensor_parallel import is_parallel_linear

ROWS = {row.model_type: row for row in registry.available()}


def make_model(model_type: str = "llama") -> PreTrainedModel:
    return tiny_model(ROWS[model_type])


def layers_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a module does: its class and its own forward."""
    return {name: (type(m), vars(m).get("forward")) for name, m in model.named_modules()}


@pytest.mark.parametrize(
    "names", [["rms_norm"], ["rotary"], ["attention"], ["gated"], ["gated", "rotary"], []]
)
def test_only_the_named_layers_are_replaced(names: list[str]) -> None:
    model = apply_patch(make_model(), layers=names)
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
        "lora",
        "tensor_parallel",
    }


@pytest.mark.parametrize(
    "layers",
    ["norm", b"", ["rms_norm", "rope"], 3.0, ["rms_norm", ["rotary"]], {"gated": False}],
)
def test_an_unknown_layer_is_an_error_that_names_the_known_ones(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"layers must be .*rms_norm.*rotary.*gated.*got"):
        apply_patch(make_model(), layers=layers)


def test_an_architecture_without_kernels_for_its_layers_says_so(monkeypatch: Any) -> None:
    row = dataclasses.replace(ROWS["llama"], layers="")
    monkeypatch.setattr(registry, "ARCHITECTURES", (row,))
    with pytest.raises(ValueError, match="no layers of llama"):
        apply_patch(make_model(), layers=["rms_norm"])
    assert not any(count_layers(apply_patch(make_model())).values())


def test_a_layer_that_the_model_lacks_is_an_error_that_names_it() -> None:
    model = make_model("mixtral")
    with pytest.raises(ValueError, match=r"MixtralForCausalLM has no gated layer"):
        apply_patch(model, layers=["gated", "rms_norm"])
    assert not any(count_layers(model).values())
    assert count_layers(apply_patch(model, layers=True))["gated"] == 0


def test_layers_that_are_all_hooked_are_left_alone() -> None:
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    model = make_model()
    for module in model.modules():
        accelerate_hooks.add_hook_to_module(module, accelerate_hooks.ModelHook())
    with pytest.raises(ValueError, match="has no gated and no rms_norm and no rotary layer"):
        apply_patch(model, layers=["gated", "rms_norm", "rotary"])
    assert not any(count_layers(apply_patch(model)).values())


def test_what_others_have_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger-Kernel and Unsloth replace functions of Transformers for all models of a kind."""
    from transformers.models.llama import modeling_llama as llama

    model, batch = make_model(), tiny_batch(make_model())
    norm, gate = llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", lambda self, x: 2 * norm(self, x))
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: 2 * gate(self, x))
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, *tables, **options: (q, k))
    eager = step(model, batch)
    with pytest.raises(ValueError, match="no gated and no rms_norm and no rotary layer"):
        apply_patch(model, layers=["gated", "rms_norm", "rotary"])
    torch.testing.assert_close(step(apply_patch(model), batch), eager)


def test_a_subclass_with_the_same_name_is_left_alone() -> None:
    from transformers.models.llama import modeling_llama as llama

    class LlamaRMSNorm(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model = make_model()
    model.model.norm.__class__ = LlamaRMSNorm
    apply_patch(model, layers=True)
    assert type(model.model.norm) is LlamaRMSNorm
    assert count_layers(model)["rms_norm"] == 4


def test_a_forward_that_is_no_function_is_left_alone() -> None:
    model = make_model()

    class Doubled:
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * x

    other = type("LlamaMLP", (type(model.model.layers[0].mlp),), {"forward": Doubled()})
    model.model.layers[0].mlp.__class__ = other
    assert count_layers(apply_patch(model, layers=True))["gated"] == 1


@pytest.mark.parametrize("way_back", ["revert", "patch_again", "hooks_first"])
def test_hooks_of_accelerate_since_the_patch_hold_no_kernel(
    way_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, calls = make_model(), []
    apply_patch(model, layers=True)
    for module in model.model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    if way_back == "hooks_first":
        hooks.remove_hook_from_submodules(model.model)
    if way_back == "patch_again":
        apply_patch(model, layers=False)
    else:
        revert_patch(model)
    kernels: list[tuple[Any, str]] = [
        (norm, "rms_norm"),
        (rotations, "needs_own_code"),
        (masked_attention, "attention"),
        (mlp, "gated"),
        (mlp, "gated_mlp"),
    ]
    for module, name in kernels:
        monkeypatch.setattr(module, name, lambda *_, **__: calls.append(1))
    model(**tiny_batch(model))
    assert not calls


@pytest.mark.parametrize("chosen", [["gated"], ["gated", "rms_norm"]])
def test_a_failed_choice_of_layers_leaves_the_model_as_it_was(chosen: list[str]) -> None:
    model = apply_patch(make_model("mixtral"), layers=True)
    counts = count_layers(model)
    with pytest.raises(ValueError, match="no gated layer"):
        apply_patch(model, layers=chosen)
    assert count_layers(model) == counts


@pytest.mark.parametrize("hooked", ["all", "one layer"])
def test_layers_that_hooks_hold_since_stay_on_kernels(hooked: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = apply_patch(make_model(), layers=True)
    counts, batch = count_layers(model), tiny_batch(model)
    expected = model(**batch).loss
    for module in (model.model if hooked == "all" else model.model.layers[0]).modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    apply_patch(model, layers=True, chunk_mib=1)
    assert count_layers(model) == counts
    assert model(**batch).loss == expected
    apply_patch(model, layers=["rotary"])
    assert count_layers(model) == dict.fromkeys(counts, 0) | {"rotary": counts["rotary"]}


def test_a_refused_choice_leaves_layers_that_hooks_hold_since_on_kernels() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = apply_patch(make_model(), layers=["rms_norm"])
    counts = count_layers(model)
    for module in model.model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    with pytest.raises(ValueError, match="no rotary layer"):
        apply_patch(model, layers=["rotary"])
    assert count_layers(model) == counts


def test_a_second_patch_looks_again_whether_a_forward_is_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = apply_patch(make_model(), layers=True)
    original = type(model.model.norm).__mro__[1]
    monkeypatch.setattr(original, "forward", lambda self, x: 2 * x)
    counts = count_layers(apply_patch(model, layers=True))
    assert counts["rms_norm"] == 0
    assert [counts[n] for n in ("rotary", "attention", "gated")] == [2] * 3
    assert counts["lora"] == counts["tensor_parallel"] == 0


def test_a_layer_of_another_class_since_is_not_reverted_silently() -> None:
    model = apply_patch(make_model(), layers=True)
    counts, norm = count_layers(model), model.model.norm
    norm.__class__ = type("Sharded", (type(norm),), {})
    for change in (revert_patch, apply_patch):
        with pytest.raises(RuntimeError, match="was given another class after apply_patch"):
            change(model)
        assert patch_status(model).patched
        assert count_layers(model) == counts


def test_torch_func_takes_the_models_own_way() -> None:
    model = make_model().double()
    ids = tiny_batch(model)["input_ids"]
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = torch.func.functional_call(model, weights, (ids,), {"use_cache": False})
        return outputs.logits.square().mean()

    expected = torch.func.grad(loss)(weights)
    apply_patch(model, layers=True)
    torch.testing.assert_close(torch.func.grad(loss)(weights), expected)


def test_a_second_derivative_is_an_error_that_says_what_to_do() -> None:
    model = apply_patch(make_model(), layers=True)
    loss = model(**tiny_batch(model)).loss
    logits = model(input_ids=tiny_batch(model)["input_ids"]).logits
    with pytest.raises(RuntimeError, match="layers=False"):
        torch.autograd.grad(logits.sum(), list(model.parameters())[1], create_graph=True)
    assert loss.isfinite()


def test_every_class_and_activation_comes_back() -> None:
    model, other = make_model(), make_model()
    before, keys = layers_of(model), list(model.state_dict())
    apply_patch(model, layers=True)
    assert list(model.state_dict()) == keys
    assert layers_of(model) != before
    assert not any(count_layers(other).values())
    revert_patch(model)
    assert layers_of(model) == before


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_has_layers_of_its_own(way: str) -> None:
    model = apply_patch(make_model(), layers=True)
    batch = tiny_batch(model)
    other = copy.deepcopy(model) if way == "copy" else pickle.loads(pickle.dumps(model))
    counts = count_layers(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    fresh = make_model()
    fresh.load_state_dict(other.state_dict())
    revert_patch(model)
    assert count_layers(other) == counts
    torch.testing.assert_close(other(**batch).loss, fresh(**batch).loss)


def test_saved_and_loaded_models_are_unpatched(tmp_path: Any) -> None:
    model = apply_patch(make_model(), layers=True)
    model.save_pretrained(tmp_path)
    loaded = type(make_model()).from_pretrained(tmp_path)
    assert not any(count_layers(loaded).values())
    batch = tiny_batch(model)
    torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = make_model("qwen3").double()
    batch = tiny_batch(model)
    truth = step(model, batch)
    apply_patch(model, layers=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    truth, ours = tell_apart(truth, step(model.train(), batch))
    assert_no_worse(ours, truth, truth, torch.float32)


def test_lora_within_the_layers_trains_as_eager() -> None:
    peft = pytest.importorskip("peft")
    results = []
    for when in ("", "before", "after"):
        torch.manual_seed(0)
        model = make_model().double()
        if when == "before":
            apply_patch(model, layers=True)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        if when == "after":
            apply_patch(model, layers=True)
        assert any(count_layers(model).values()) == bool(when)
        results.append(step(model, tiny_batch(model.get_base_model())))
    eager, *ours = results
    for each in ours:
        truth, found = tell_apart(eager, each)
        assert_no_worse(found, truth, truth, torch.float32)


@pytest.mark.parametrize(
    ("model_type", "norms", "rotary", "attentions", "gated"),
    [
        ("llama", 5, 2, 2, 2),
        ("gemma2", 9, 2, 2, 2),
        ("gemma3_text", 13, 2, 2, 2),
        ("qwen3", 9, 2, 2, 2),
        ("mixtral", 5, 2, 2, 0),  # experts are no layers of theirs
        ("phi3", 5, 2, 2, 2),
        ("glm4", 9, 2, 2, 2),
        ("qwen2_5_vl", 8, 3, 2, 3),  # attention of images is not causal
        ("llama4_text", 7, 2, 2, 2),  # the shared experts' gates
        ("cohere", 0, 2, 2, 2),  # its norm subtracts the mean
        ("phi", 0, 2, 2, 0),
    ],
)
def test_all_layers_of_a_model_are_replaced(
    model_type: str, norms: int, rotary: int, attentions: int, gated: int
) -> None:
    model = apply_patch(make_model(model_type), layers=True)
    counts = {"rms_norm": norms, "rotary": rotary, "attention": attentions, "gated": gated}
    assert count_layers(model) == {**counts, "lora": 0, "tensor_parallel": 0}


def test_generation_is_the_same() -> None:
    model = make_model().eval()
    prompt = tiny_batch(model)["input_ids"][:1, :4]
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **how)
    assert torch.equal(apply_patch(model, layers=True).generate(prompt, **how), expected)


def test_nothing_is_replaced_that_a_hook_holds() -> None:
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    model = make_model()
    norm = model.model.norm
    accelerate_hooks.add_hook_to_module(norm, accelerate_hooks.ModelHook())
    apply_patch(model, layers=True)
    assert type(norm) is type(make_model().model.norm)
    assert count_layers(model)["rms_norm"] == 4
    assert set(count_layers(model)) == set(LAYERS)


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_an_attention_sees_what_its_module_has_now(
    monkeypatch: pytest.MonkeyPatch, nothing_is_compiled: None
) -> None:
    """Whichever model of its class was patched first, and when."""
    from transformers.models.llama import modeling_llama

    calls = []
    eager_attention = modeling_llama.eager_attention_forward

    def recorded(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return eager_attention(*arguments, **options)

    def attending() -> PreTrainedModel:
        model = make_model()
        model.set_attn_implementation("eager")
        return apply_patch(model, layers=True)

    first = attending()
    call(first, tiny_batch(first))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", recorded)
    for model in (first, attending()):
        calls.clear()
        call(model, tiny_batch(model))
        assert len(calls) == model.config.num_hidden_layers
    calls.clear()
    compiled = attending()
    del compiled.model.layers[1:]  # each takes the compiler seconds
    with torch.no_grad():
        torch.compile(compiled.model, backend="eager")(tiny_batch(first)["input_ids"])
    assert calls


@pytest.mark.parametrize("kind", ["rms_norm", "rotary", "gated"])
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_a_layer_that_is_given_shards_runs_its_own_code(
    model_type: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would read memory that a tensor of tensors does not have."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = apply_patch(make_model(model_type), layers=True)
    layer = model.model.layers[0]
    for module, name in ((norm, "rms_norm"), (mlp, "gated")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("on a kernel"))
    monkeypatch.setitem(ROTATIONS, "apply_rotary_pos_emb", None)
    x = torch.randn(2, 9, model.config.hidden_size)
    two = TwoTensor(x, x.clone())
    module, arguments = {
        "rms_norm": (layer.input_layernorm, (two,)),
        "gated": (layer.mlp, (two,)),
        "rotary": (layer.self_attn, (two, model.model.rotary_emb(x, torch.arange(9)[None]), None)),
    }[kind]
    with torch.no_grad():
        result = module(*arguments)
        plain = type(module)._liger_patch_original.forward(
            module, *(x if each is two else each for each in arguments)
        )
    if kind == "rotary":
        result, plain = result[0], plain[0]
    assert type(result) is TwoTensor
    torch.testing.assert_close(result.a, plain)


def test_a_hook_around_a_plans_forward_is_not_read_as_the_plan() -> None:
    """accelerate's hooks are partial functions that say to be of Transformers' module."""
    linear = torch.nn.Linear(2, 2)
    forward = functools.partial(torch.nn.Linear.forward, linear)
    linear.forward = functools.update_wrapper(forward, tp_like())
    assert not is_parallel_linear(linear)
    with pytest.raises(ValueError, match="has no tensor_parallel layer"):
        apply_patch(make_model(), layers=["tensor_parallel"])


def tp_like() -> Any:
    def tp_forward(x: Any) -> Any:
        return x

    tp_forward.__module__ = "transformers.distributed.tensor_parallel"
    return tp_forward
