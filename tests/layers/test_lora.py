"""Models with LoRA adapters on kernels: what is fused, that it trains as PEFT's own layers, and
that everything else is left to them.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compiled_graphs import Graphs
from exactness import assert_no_worse
from lora_models import (
    ALL,
    MLP,
    OUT,
    QKV,
    ROWS,
    WAYS,
    Calls,
    Groups,
    adapted,
    lora_layers,
    peft,
    training_step,
)
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_step import call, joined, tell_apart, widened

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.layers.lora import computed_together, not_plain
from liger_patch.layers.replace import count_layers

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
        # models made here are not on disk, where PEFT looks for their configuration
        "ignore:Could not find a config file in:UserWarning",
        "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
    )
]

LAYER: Groups = [QKV, OUT, MLP]  # what a layer of all adapters runs
TARGETS: dict[str, tuple[tuple[str, ...], Groups]] = {
    "all": (ALL, LAYER),
    "q and v": (("q_proj", "v_proj"), [("q_proj", "v_proj")]),
    "attention": ((*QKV, *OUT), [QKV, OUT]),
    "one": (("k_proj",), [("k_proj",)]),
    "feed-forward": (MLP, [MLP]),
    "gate alone": (("gate_proj",), [("gate_proj",)]),
    "gate and down": (("gate_proj", "down_proj"), [("gate_proj",), ("down_proj",)]),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def batch_of(model: Any) -> Any:
    return tiny_batch(model.get_base_model())


def copies(**options: Any) -> tuple[Any, Any, Any]:
    """Two models in float64, one of them patched, and a batch."""
    eager = adapted(base=tiny_model(ROWS["llama"]).double(), **options)
    return eager, apply_patch(copy.deepcopy(eager)), batch_of(eager)


def assert_same(ours: Any, eager: Any, batch: Any) -> None:
    """Models of float64."""
    truth, ours = tell_apart(training_step(eager, batch), training_step(ours, batch))
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", slow_but(["qwen3"], ["llama", "qwen3", "gemma3_text"]))
def test_projections_of_one_input_are_one_function(
    model_type: str, targets: str, calls: Calls
) -> None:
    """And PEFT's own forwards do not run."""
    names, groups = TARGETS[targets]
    base = tiny_model(ROWS[model_type]).double()
    eager = adapted(base=base, target_modules=list(names))
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    layers = base.config.num_hidden_layers
    assert count_layers(model)["lora"] == len(names) * layers
    status = str(patch_status(model))
    assert f"{len(names) * layers} lora" in status
    assert "PEFT's own forward" not in status
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == (groups * layers, [])


def test_a_projection_that_is_split_behind_runs_singly(calls: Calls) -> None:
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    eager = adapted(base=tiny_model(ROWS["phi3"]).double(), target_modules=list(names))
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == ([(name,) for name in names] * 2, [])


@pytest.mark.filterwarnings("ignore:liger_patch. PEFT.s own forward runs")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_every_precision_is_no_worse_than_eager(model_type: str, way: str, calls: Calls) -> None:
    dtype, wide_adapters, autocast = WAYS[way]
    eager_model = adapted(model_type, dtype=dtype, wide_adapters=wide_adapters)
    batch, wide = batch_of(eager_model), copy.deepcopy(eager_model).double()
    model = apply_patch(copy.deepcopy(eager_model))
    eager = training_step(eager_model, batch, autocast=autocast)
    calls.clear()
    ours = training_step(model, batch, autocast=autocast)
    groups, by_peft = calls.taken(model)
    if way == "float32 adapters without autocast":  # PEFT casts x for each
        assert (groups, len(by_peft)) == ([], 14)
    else:
        assert (groups, by_peft) == (LAYER * 2, [])
    for name, value in eager.items():
        got = ours[name]
        assert value is not None
        assert got is not None
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
    truth, eager, ours = joined(training_step(wide, batch), eager, ours)
    assert_no_worse(ours, eager, truth, dtype if not autocast else torch.bfloat16)


class Products(TorchDispatchMode):
    """Counts those of a base: adapters have thin ones."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "mm" in str(func) and isinstance(result, Tensor):
            shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            self.number += all(4 not in shape for shape in shapes)
        return result


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["float32", "autocast"])
def test_checkpoints(way: str, reentrant: bool, calls: Calls) -> None:
    """No worse than eager, the same bits as without, and not one product more than eager."""
    dtype, wide_adapters, autocast = WAYS[way]
    eager_model = adapted(dtype=dtype, wide_adapters=wide_adapters)
    wide, model = copy.deepcopy(eager_model).double(), apply_patch(copy.deepcopy(eager_model))
    plain, batch = apply_patch(copy.deepcopy(eager_model)), batch_of(eager_model)
    for each in (eager_model, model):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    results, products = [], []
    for each in (eager_model, model):
        calls.clear()
        results.append(training_step(each, batch, autocast=autocast))
    groups, by_peft = calls.taken(model)
    assert (len(groups), by_peft) == (2 * len(LAYER) * 2, [])  # each layer twice
    expected = training_step(plain, batch, autocast=autocast)
    for name, value in results[1].items():
        assert value is not None
        assert torch.equal(value, expected[name]), name  # type: ignore[arg-type]
    truth, eager, ours = joined(training_step(wide, batch), *results)
    assert_no_worse(ours, eager, truth, dtype)
    for each in (eager_model, model):
        with Products() as counted:
            training_step(each, batch, autocast=autocast)
        products.append(counted.number)
    assert 0 < products[1] <= products[0]


def second(model: Any) -> Any:
    """Add an adapter of another rank and scale, and leave the first active."""
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    model.add_adapter("second", config)
    return model


def switched(model: Any) -> None:
    second(model).set_adapter("second")


def switched_back(model: Any) -> None:
    switched(model)
    model.set_adapter("default")


def deleted(model: Any) -> None:
    switched(model)
    model.delete_adapter("default")


def unmerged(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def scaled(model: Any) -> None:
    for layer in lora_layers(model).values():
        layer.scale_layer(3.0)


def renewed(model: Any) -> None:
    """As an optimiser that gives parameters new memory does."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data * 1.5


SECOND: Groups = [("q_proj",), ("up_proj",)]
PLAIN_STATES: dict[str, tuple[Callable[[Any], object], Groups]] = {
    "second adapter, not active": (second, LAYER),
    "switched": (switched, SECOND),
    "switched back": (switched_back, LAYER),
    "first one deleted": (deleted, SECOND),
    "merged and unmerged": (unmerged, LAYER),
    "scaled": (scaled, LAYER),
    "new memory": (renewed, LAYER),
    "evaluation and training": (lambda model: model.eval().train(), LAYER),
}


@pytest.mark.parametrize("state", PLAIN_STATES)
def test_adapters_are_asked_for_at_every_call(state: str, calls: Calls) -> None:
    change, groups = PLAIN_STATES[state]
    eager, model, batch = copies()
    training_step(model, batch)
    for each in (eager, model):
        change(each)
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    ran, by_peft = calls.taken(model)
    assert ran == groups * 2
    assert len(by_peft) == (2 * 5 if groups == SECOND else 0)  # those without an active adapter


PLAIN_OPTIONS: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True, "lora_alpha": 5},
    "pattern of ranks": {"rank_pattern": {"q_proj": 2, "down_proj": 7}},
    "pattern of scales": {"alpha_pattern": {"k_proj": 3, "up_proj": 20}},
    "rank 1": {"r": 1},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "B of zeros": {"init_lora_weights": True},
    "layers": {"layers_to_transform": [0, 1]},
}


@pytest.mark.parametrize("options", PLAIN_OPTIONS.values(), ids=PLAIN_OPTIONS)
def test_options_of_a_plain_adapter(options: dict[str, Any], calls: Calls) -> None:
    base = tiny_model(ROWS["llama"])  # decompositions come in float32
    eager = adapted(base=base, **options).double()
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    truth = training_step(eager, batch)
    calls.clear()
    ours = training_step(model, batch)
    assert calls.taken(model) == (LAYER * 2, [])
    if options.get("init_lora_weights") is not True:  # of which half the gradients are zero
        truth, ours = tell_apart(truth, ours)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "layers.0", "mlp"])
def test_frozen_adapters_get_no_gradient(frozen: str) -> None:
    eager, model, batch = copies()
    for each in (eager, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name and frozen not in name)
    truth, ours = training_step(eager, batch), training_step(model, batch)
    assert any(value is None for value in truth.values())
    assert_no_worse(ours, truth, truth, torch.float32)


def test_bases_that_train(calls: Calls) -> None:
    eager, model, batch = copies()
    results = []
    for each in (eager, model):
        for parameter in each.parameters():
            parameter.requires_grad_()
        loss = call(each, batch).loss
        loss.backward()
        grads = {name: parameter.grad for name, parameter in each.named_parameters()}
        results.append({"loss": loss.detach(), **grads})
    truth, ours = tell_apart(*results)
    assert_no_worse(ours, truth, truth, torch.float32)


def biased(model: Any) -> None:
    for name, layer in lora_layers(model).items():
        if name.endswith(("q_proj", "down_proj")):
            layer.base_layer.bias = nn.Parameter(torch.ones(layer.out_features).double())


def test_bases_with_a_bias(calls: Calls) -> None:
    eager, _, batch = copies()
    biased(eager)
    model = apply_patch(copy.deepcopy(eager))
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == (LAYER * 2, [])


class Case(NamedTuple):
    """What hangs on a model, and why which projections of the first layer are not plain."""

    hang: Callable[[Any], object]
    reason: str
    projections: tuple[str, ...] = ALL
    options: dict[str, Any] = {}  # noqa: RUF012
    layers: int = 1


def of(name: str, change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Of the first layer's projection of that name."""

    def hang(model: Any) -> None:
        layers = lora_layers(model).items()
        change(
            next(
                layer
                for path, layer in layers
                if path.endswith(f"0.self_attn.{name}") or path.endswith(f"0.mlp.{name}")
            )
        )

    return hang


def nothing(model: Any) -> None:
    pass


def several(model: Any) -> None:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])


def doubles(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: 2 * output)


def parametrized(layer: Any) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(layer.lora_A["default"], "weight", Half())


def of_another_class(layer: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer.base_layer.__class__ = Doubled


def replaced(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **options: 2 * forward(*args, **options)


NOT_PLAIN = {  # by why not
    "several active adapters": Case(several, "2 active", ("q_proj", "up_proj"), layers=2),
    "no active adapter": Case(lambda m: m.base_model.set_adapter([]), "0 active", layers=2),
    "DoRA": Case(nothing, "DoraLinearVariant", options={"use_dora": True}, layers=2),
    "bias of B": Case(nothing, "lora_bias=True", options={"lora_bias": True}, layers=2),
    "merged": Case(lambda m: m.merge_adapter(), "adapters are merged", layers=2),
    "disabled": Case(
        lambda m: m.base_model.disable_adapter_layers(), "adapters are disabled", layers=2
    ),
    "hook of A": Case(of("v_proj", lambda m: doubles(m.lora_A["default"])), "hooks", ("v_proj",)),
    "hook of B": Case(of("up_proj", lambda m: doubles(m.lora_B["default"])), "hooks", ("up_proj",)),
    "hook of a base": Case(of("o_proj", lambda m: doubles(m.base_layer)), "hooks", ("o_proj",)),
    "forward of a base": Case(
        of("down_proj", lambda m: replaced(m.base_layer)), "hooks", ("down_proj",)
    ),
    "parametrization of A": Case(of("q_proj", parametrized), "another class", ("q_proj",)),
    "class of a base": Case(of("q_proj", of_another_class), "the base is a Doubled", ("q_proj",)),
}


NO_ADAPTER = ("no active adapter", "merged", "disabled")  # takes part, and has a gradient


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")  # of a base without one
@pytest.mark.parametrize("when", slow_but(["after"], ["before", "after"]))
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_runs_as_peft_has_it(name: str, when: str, calls: Calls) -> None:
    """And the other projections on kernels."""
    case = NOT_PLAIN[name]
    eager = adapted(base=tiny_model(ROWS["llama"]).double(), **case.options)
    batch = batch_of(eager)
    if when == "before":
        case.hang(eager)
        if name in ("class of a base", "parametrization of A", "forward of a base"):
            # local classes, and a bound method that a copy would share
            torch.manual_seed(0)
            model = adapted(base=tiny_model(ROWS["llama"]).double(), **case.options)
            case.hang(model)
            apply_patch(model)
        else:
            model = apply_patch(copy.deepcopy(eager))
    else:
        model = apply_patch(copy.deepcopy(eager))
        training_step(model, batch)
        for each in (eager, model):
            case.hang(each)
    if name in NO_ADAPTER:
        truth, ours = ({"loss": call(each, batch).loss.detach()} for each in (eager, model))
    else:
        truth, ours = training_step(eager, batch), training_step(model, batch)
    calls.clear()
    with torch.no_grad():
        model(**batch)
    ran, by_peft = calls.taken(model)
    assert_no_worse(ours, truth, truth, torch.float32)
    assert sorted(by_peft) == sorted(case.projections * case.layers)
    on_kernels = {each for group in ran for each in group}
    assert on_kernels == set(ALL) - set(case.projections if case.layers == 2 else ())
    ((reason, count),) = not_plain(model).items()
    assert case.reason in reason
    assert count == len(case.projections) * case.layers
    assert f"{count} in PEFT's own forward: {reason}" in str(patch_status(model))


def test_the_status_is_that_of_the_last_calls_dtypes(calls: Calls) -> None:
    eager = adapted(dtype=torch.bfloat16)  # float32 adapters
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert not_plain(model) == {}
    with pytest.warns(UserWarning, match="runs 14 of the LoRA layers: weights of several"):
        training_step(model, batch)
    training_step(model, batch)  # says no more
    calls.clear()
    training_step(model, batch)
    assert len(calls.taken(model)[1]) == 14
    assert not_plain(model) == {"weights of several dtypes outside autocast": 14}
    training_step(model, batch, autocast=True)
    assert calls.taken(model) == (LAYER * 2, [])
    assert not_plain(model) == {}


def test_dtypes_are_a_warning_in_training_alone() -> None:
    """Once for its adapters: pytest makes an error of any other."""
    model = apply_patch(adapted(dtype=torch.bfloat16))  # float32 adapters
    batch = batch_of(model)
    with torch.no_grad():
        model(**batch)
    model.eval()
    model(**batch)
    model.train()
    with model.disable_adapter():
        model(**batch)
    with pytest.warns(UserWarning, match="14 of the LoRA layers") as caught:
        model(**batch)
    assert "liger_patch/patch" not in caught[0].filename  # but where the model is called
    model(**batch)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    model.set_adapter("second")
    for name, p in model.named_parameters():
        if "second" in name:  # in the dtype of its base, by PEFT 0.18
            p.data = p.data.float()
    with pytest.warns(UserWarning, match="2 of the LoRA layers"):
        model(**batch)


def test_dtypes_of_an_earlier_call_are_no_warning() -> None:
    model = apply_patch(adapted(dtype=torch.bfloat16))
    batch = batch_of(model)
    other = next(iter(lora_layers(model).values()))
    model.get_base_model().other = other = copy.deepcopy(other)  # training does not call it
    with torch.no_grad():
        other(torch.randn(2, other.in_features, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)


def test_the_status_does_not_count_layers_that_are_to_come_or_left_out() -> None:
    base = tiny_model(ROWS["llama"])
    apply_patch(base)
    model = adapted(base=base)
    assert not_plain(model) == {}
    assert not_plain(apply_patch(adapted(), layers=["rms_norm"])) == {}


def test_the_status_counts_layers_of_other_tuners() -> None:
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"])
    model: Any = peft.get_peft_model(tiny_model(ROWS["llama"]), config)
    apply_patch(model)
    assert not_plain(model) == {"Linear (vera)": 4}
    assert "4 in PEFT's own forward: Linear (vera)" in str(patch_status(model))


def test_the_status_counts_layers_whose_forward_was_replaced() -> None:
    model = adapted()
    replaced(next(iter(lora_layers(model).values())))
    apply_patch(model)
    assert not_plain(model) == {"its forward was replaced": 1}


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
    layer = next(m for n, m in model.named_modules() if n.endswith("0.self_attn.q_proj"))
    torch.func.vmap(layer)(torch.randn(2, 3, 32).double())
    assert not_plain(model) == {"torch.func or a tensor subclass": 1}
    layer(torch.randn(2, 3, 32).double())
    assert not_plain(model) == {}


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "gate_proj", "down_proj", "o_proj"])
@pytest.mark.parametrize("how", slow_but(["hook"], ["hook", "pre-hook", "forward"]))
def test_what_hangs_on_a_projection_itself_runs(projection: str, how: str) -> None:
    change: Callable[[Any], object] = {
        "hook": doubles,
        "pre-hook": lambda m: m.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
        "forward": replaced,
    }[how]
    for when in ("before", "after"):
        eager, model, batch = copies()
        if when == "before":
            revert_patch(model)
        of(projection, change)(eager)
        of(projection, change)(model)
        assert_same(apply_patch(model) if when == "before" else model, eager, batch)


def test_full_backward_hooks_of_a_projection_see_its_gradients() -> None:
    eager, model, batch = copies()
    seen: list[list[Tensor]] = []
    for each in (eager, model):
        each.enable_input_require_grads()
        found: list[Tensor] = []
        for name in ("k_proj", "up_proj"):
            of(
                name,
                lambda m, found=found: m.register_full_backward_hook(
                    lambda _, dx, dy, found=found: found.extend([*dx, *dy])
                ),
            )(each)
        training_step(each, batch)
        seen.append(found)
    truth, ours = ({str(i): each for i, each in enumerate(found)} for found in seen)
    assert len(truth) == 4
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("name", ["disable_adapter", "adapter_names"])
def test_contexts_of_peft(name: str) -> None:
    eager, model, batch = copies()
    before = training_step(model, batch)["loss"]
    if name == "disable_adapter":
        with eager.disable_adapter(), model.disable_adapter():
            truth, ours = eager(**batch).loss, model(**batch).loss
    else:  # an adapter for each row of the batch
        for each in (eager, model):
            second(each).eval()
        names = {"adapter_names": ["second", "default"]}
        truth, ours = eager(**batch, **names).loss, model(**batch, **names).loss
    assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    assert not torch.equal(ours, before)  # type: ignore[arg-type]
    assert_same(model, eager, batch)


def test_weights_that_are_merged_for_good() -> None:
    eager, model, batch = copies()
    training_step(model, batch)
    results = []
    for each in (eager, model):
        merged = each.merge_and_unload()
        assert not lora_layers(merged)
        results.append({"loss": merged(**batch).loss.detach()})
    assert count_layers(merged)["lora"] == 0
    assert_no_worse(results[1], results[0], results[0], torch.float32)
    revert_patch(merged)


OTHERS: dict[str, tuple[Callable[[], Any], int]] = {
    "IA3": (
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        0,
    ),
    "VeRA": (
        lambda: peft.VeraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_weights=False
        ),
        0,
    ),
    "LoHa": (
        lambda: peft.LoHaConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_weights=False
        ),
        0,
    ),
    "saved modules": (
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            init_lora_weights=False,
            modules_to_save=["lm_head", "up_proj"],
        ),
        2,
    ),
    "head": (
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"], init_lora_weights=False
        ),
        2,
    ),
    "embedding": (
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "embed_tokens"],
            init_lora_weights=False,
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tuners_and_modules(name: str) -> None:
    """Are left alone, the head's adapter to the head."""
    config, counted = OTHERS[name]
    torch.manual_seed(1)
    eager = peft.get_peft_model(tiny_model(ROWS["llama"]).double(), config())
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert count_layers(model)["lora"] == counted
    results = []
    for each in (eager, model):
        loss = call(each.train(), batch).loss
        loss.backward()
        grads = {n: p.grad for n, p in each.named_parameters() if p.requires_grad}
        results.append({"loss": loss.detach(), **grads})
    truth, ours = results
    assert any(value is not None and value.any() for name, value in truth.items() if name != "loss")
    assert_no_worse(ours, truth, truth, torch.float32)
    assert patch_status(model).fused


def test_weights_that_are_stored_transposed_run_as_peft_has_them(calls: Calls) -> None:
    """fan_in_fan_out of a linear layer: PEFT warns and corrects it, but by hand it stays."""
    eager, model, batch = copies()
    for each in (eager, model):
        for layer in lora_layers(each).values():
            layer.fan_in_fan_out = True
    assert_same(model, eager, batch)
    assert not_plain(model) == {"fan_in_fan_out=True": 14}


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_dropout(rate: float, calls: Calls) -> None:
    """In training only; the same seed gives the same step, under checkpoints too."""
    eager, model, batch = copies(lora_dropout=rate)
    for each in (eager, model):
        each.eval()
    truth, ours = eager(**batch).loss, model(**batch).loss
    assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    calls.clear()
    first, again = training_step(model, batch), training_step(model, batch)
    groups, by_peft = calls.taken(model)
    if rate == 1.0:
        assert (groups, len(by_peft)) == ([], 2 * 2 * len(ALL))
    else:
        assert (groups, by_peft) == (LAYER * 4, [])
        assert not torch.equal(first["loss"], ours)  # type: ignore[arg-type]
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = training_step(model, batch)
    for name, value in first.items():
        for other in (again[name], checkpointed[name]):
            assert other is not None
            assert torch.equal(value, other), name  # type: ignore[arg-type]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
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
    truth, plain, ours = joined(
        training_step(wide, batch), training_step(eager, batch), {"loss": loss.detach(), **ours}
    )
    assert_no_worse(ours, plain, truth, torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_compiled_feed_forward_layer_is_one_graph(calls: Calls) -> None:
    _, model, _ = copies()
    layer = next(m for n, m in model.named_modules() if n.endswith("0.mlp"))
    x = torch.randn(2, 3, 32).double()
    expected = layer(x)
    calls.clear()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    groups, _ = calls.taken(model)
    assert groups == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["mlp", "self_attn.o_proj"])
def test_torch_jit_trace_records_peft_s_own_code(name: str, calls: Calls) -> None:
    _, model, _ = copies()
    layer = next(m for n, m in model.named_modules() if n.endswith(f"0.{name}"))
    x = torch.randn(2, 3, 32).double()
    calls.clear()
    example = torch.randn(2, 3, 32).double()
    traced: Any = torch.jit.trace(nn.Sequential(layer), example, check_trace=False)
    groups, _ = calls.taken(model)
    assert groups == []
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_on_kernels(how: str, calls: Calls) -> None:
    eager, model, batch = copies()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    revert_patch(model)
    assert count_layers(other)["lora"] == 14
    assert_same(other, eager, batch)
    calls.clear()
    training_step(other, batch)
    assert calls.taken(other) == (LAYER * 2, [])


def test_everything_is_taken_back() -> None:
    eager, model, batch = copies()
    classes = {name: type(m) for name, m in eager.named_modules()}
    assert {name for name, m in model.named_modules() if type(m) is not classes[name]} >= set(
        lora_layers(model)
    )
    revert_patch(model)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert training_step(model, batch)["loss"] == training_step(eager, batch)["loss"]


def test_a_name_for_itself(calls: Calls) -> None:
    """layers=["lora"] leaves the other layers alone; feed-forward layers are those of "gated"."""
    eager, model, batch = copies()
    apply_patch(model, layers=["lora"])
    counts = count_layers(model)
    assert counts == {"rms_norm": 0, "rotary": 0, "gated": 0, "lora": 14}
    assert_same(model, eager, batch)
    apply_patch(model, layers=["rms_norm", "rotary", "gated"])
    assert count_layers(model)["lora"] == 0
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    groups, _ = calls.taken(model)
    assert groups == []


def test_a_model_beside_it_is_left_alone(calls: Calls) -> None:
    eager, model, batch = copies()
    training_step(model, batch)
    calls.clear()
    training_step(eager, batch)
    groups, by_peft = calls.taken(eager)
    assert (groups, len(by_peft)) == ([], 14)
    assert not any(hasattr(type(layer), "_liger_patch_layer") for layer in eager.modules())


@pytest.mark.parametrize("layers", [True, ["lora"], ["gated", "lora"]], ids=str)
def test_adapters_that_come_after_the_patch(layers: Any, calls: Calls) -> None:
    base = apply_patch(tiny_model(ROWS["llama"]).double(), layers=layers)
    model = adapted(base=base)
    eager = adapted(base=tiny_model(ROWS["llama"]).double())
    batch = batch_of(eager)
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    groups, by_peft = calls.taken(model)
    assert by_peft == []
    assert [each for group in groups for each in group] == list(ALL) * 2
    assert count_layers(model)["lora"] == 14
    revert_patch(model)
    assert not any(hasattr(type(layer), "_liger_patch_layer") for layer in model.modules())


@pytest.mark.parametrize("layers", [False, ["gated"]], ids=str)
def test_adapters_that_come_after_a_patch_without_them(layers: Any, calls: Calls) -> None:
    model = adapted(base=apply_patch(tiny_model(ROWS["llama"]), layers=layers))
    batch = batch_of(model)
    training_step(model, batch)
    groups, by_peft = calls.taken(model)
    assert (groups, len(by_peft)) == ([], 14)
    assert count_layers(model)["lora"] == 0


def test_an_adapter_that_is_added_after_the_patch(calls: Calls) -> None:
    """To layers that had none."""
    eager, model, batch = copies(target_modules=["q_proj"])
    options = {"r": 2, "target_modules": list(ALL), "init_lora_weights": False}
    for each in (eager, model):
        torch.manual_seed(2)
        each.add_adapter("second", peft.LoraConfig(**options))
        each.set_adapter("second")
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == (LAYER * 2, [])


def test_an_adapter_in_the_place_of_a_deleted_one(calls: Calls) -> None:
    """Of the same name, and of other layers."""
    eager, model, batch = copies(target_modules=["q_proj"])
    training_step(model, batch)
    for each in (eager, model):
        torch.manual_seed(2)
        options = {"r": 2, "target_modules": list(ALL), "init_lora_weights": False}
        each.delete_adapter("default")
        each.add_adapter("default", peft.LoraConfig(**options))
        each.set_adapter("default")
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == (LAYER * 2, [])


def test_the_same_configuration_once_more(calls: Calls) -> None:
    base: Any = apply_patch(tiny_model(ROWS["llama"]).double())
    config = peft.LoraConfig(r=4, target_modules=list(ALL), task_type="CAUSAL_LM")
    for _ in range(2):
        model = peft.get_peft_model(base, config)
        calls.clear()
        training_step(model, batch_of(model))
        assert calls.taken(model) == (LAYER * 2, [])
        assert model.unload() is base
        if "peft_config" in vars(base):  # PEFT 0.18
            pytest.skip("PEFT keeps the configurations of a model that it has unloaded")


def test_saved_adapters_are_eagers(tmp_path: Path) -> None:
    eager, model, batch = copies()
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
    loaded = peft.PeftModel.from_pretrained(
        tiny_model(ROWS["llama"]).double(), tmp_path / "ours", is_trainable=True
    )
    assert_same(apply_patch(loaded), eager, batch)


def test_threads_have_siblings_of_their_own(calls: Calls) -> None:
    """Several forward passes of one model at the same time."""
    model = apply_patch(adapted())
    batch = batch_of(model)
    expected = model(**batch).loss
    losses: list[Tensor] = []

    def run() -> None:
        for _ in range(5):
            losses.append(model(**batch).loss.detach())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 20
    assert all(torch.equal(loss, expected) for loss in losses)


def doubles_in_place(module: nn.Module, args: Any) -> None:
    args[0].mul_(2)


def test_an_input_that_a_hook_changes_in_place() -> None:
    """Between two projections that are computed together."""
    eager, model, batch = copies()
    for each in (eager, model):
        layer = next(m for n, m in each.named_modules() if n.endswith("0.self_attn.v_proj"))
        layer.register_forward_pre_hook(doubles_in_place)
    with torch.no_grad():
        expected, loss = (each(**batch).loss for each in (eager, model))
    torch.testing.assert_close(loss.float(), expected.float())


def test_an_exception_within_an_attention_leaves_nothing_behind(calls: Calls) -> None:
    eager, model, batch = copies()
    attention = next(m for n, m in model.named_modules() if n.endswith("0.self_attn"))

    def fails(*_: Any) -> None:
        raise KeyError("k")

    handle = attention.k_proj.register_forward_pre_hook(fails)
    with pytest.raises(KeyError):
        model(**batch)
    handle.remove()
    assert_same(model, eager, batch)
    x = torch.randn(2, 3, attention.q_proj.in_features).double()
    calls.clear()
    attention.k_proj(x)  # by itself
    assert calls.taken(model) == ([("k_proj",)], [])


def test_projections_of_other_widths_are_not_computed_together(calls: Calls) -> None:
    _, model, _ = copies()
    attention = next(m for n, m in model.named_modules() if n.endswith("0.self_attn"))
    k_proj, width = attention.k_proj, attention.k_proj.in_features // 2
    for each in (k_proj.base_layer, k_proj.lora_A["default"]):
        each.weight = torch.nn.Parameter(each.weight.detach()[:, :width])
    k_proj.in_features = width
    x = torch.randn(2, 3, 2 * width).double()
    with computed_together(attention):
        attention.q_proj(x)
        attention.k_proj(x[..., :width])
    assert calls.taken(model) == ([("q_proj",), ("k_proj",)], [])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_of_functions_run_peft_s_own_code(transform: str) -> None:
    eager, model, _ = copies()
    x = torch.randn(2, 3, 32).double()
    results = []
    for each in (eager, model):
        layer = next(m for n, m in each.named_modules() if n.endswith("0.self_attn.q_proj"))
        with torch.no_grad():
            if transform == "vmap":
                results.append(torch.func.vmap(layer)(x))
            else:
                results.append(torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1])
    assert torch.equal(*results)


def test_one_row_and_no_rows() -> None:
    _, model, _ = copies()
    layer = next(m for n, m in model.named_modules() if n.endswith("0.self_attn.q_proj"))
    for shape in ((32,), (0, 32), (2, 0, 32)):
        y = layer(torch.randn(shape).double())
        assert y.shape == (*shape[:-1], layer.out_features)


def test_widened_models_are_those_of_float64() -> None:
    """The truth of these tests: a copy in float64 has the same adapters."""
    model = adapted()
    wide = widened(model)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert list(wide.state_dict()) == list(model.state_dict())
