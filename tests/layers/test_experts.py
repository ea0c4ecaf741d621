"""Experts of mixtures on kernels, alone and with PEFT's adapters (``target_parameters``): training
steps are eager's, in every architecture that has such experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from lora_models import (
    BOTH,
    MARKS,
    QWEN,
    WAYS,
    assert_same,
    batch_of,
    beside,
    experts_of,
    pair,
    peft,
    training_step,
    unmerged,
    with_adapters,
)
from rows import every_row, model_type
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import nn
from training_step import (
    assert_right,
    assert_same_step,
    router_arguments,
    step,
    with_checkpoints,
)

from liger_patch import apply_patch, patch_status, registry
from liger_patch.kernels import chunk_sizes
from liger_patch.layers import checks, experts
from liger_patch.layers.lora import not_plain
from liger_patch.layers.replace import count_layers

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings(
        "ignore:The following .*_pattern keys did not match:RuntimeWarning"  # but they did
    ),
]

GPT = "gpt_oss"
MIXTURES = [row for row in registry.available() if "experts" in row.kinds.split()]
Runs = Callable[[Any, Any], list[tuple[bool, bool]]]


@pytest.fixture
def runs(record: Callable[..., list[Any]]) -> Runs:
    """A function that takes a step, and returns of each call of the operator which of its weights
    have adapters beside them.
    """
    found = record(experts, "run_experts", lambda *a: (a[3].a is not None, a[4].a is not None))

    def of_step(model: Any, batch: Any) -> list[tuple[bool, bool]]:
        found.clear()
        training_step(model, batch)
        return [*found]

    return of_step


@pytest.mark.parametrize("row", every_row(MIXTURES), ids=model_type)
def test_adapters_of_every_architecture(row: registry.Architecture, runs: Runs) -> None:
    check_adapters(tiny_model(row).double(), runs)


def check_adapters(base: Any, runs: Runs) -> None:
    eager, model, batch = beside(with_adapters(base))
    names = experts_of(model)
    assert f"{len(names)} experts" in str(patch_status(model))
    assert "PEFT's own forward" not in str(patch_status(model))
    assert_same(model, eager, batch)
    of_text = [name for name in names if ".vision_moe." not in name]  # there is no image
    assert runs(model, batch) == [(True, True)] * len(of_text) > []


def test_adapters_of_the_mixture_of_gemma_4(runs: Runs) -> None:
    """Most of its models have none, so its row promises none."""
    if "gemma4_text" not in ROWS:
        pytest.skip("not in this Transformers")
    model: Any = tiny_model("gemma4_text")
    config = copy.deepcopy(model.config)
    config.enable_moe_block, config.num_experts, config.top_k_experts = True, 4, 2
    config.moe_intermediate_size = 24
    torch.manual_seed(0)
    check_adapters(type(model)._from_config(config, experts_implementation="eager").double(), runs)


OPTIONS: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True, "lora_alpha": 5},
    "scale": {"lora_alpha": 3},
    "rank 1": {"r": 1},
    "rank 24": {"r": 24},
    "pattern of ranks": {"rank_pattern": {"mlp.experts.gate_up_proj": 2}},
    "pattern of scales": {"alpha_pattern": {"mlp.experts.down_proj": 20}},
    "first product alone": {"parameters": ("gate_up_proj",)},
    "second product alone": {"parameters": ("down_proj",)},
    "attention too": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}


@pytest.mark.parametrize("kind", [QWEN, GPT])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_an_adapter(options: dict[str, Any], kind: str, runs: Runs) -> None:
    """gpt-oss has biases, clamped gates and weights that lie the other way."""
    eager, model, batch = pair(kind, **options)
    assert_same(model, eager, batch)
    parameters = options.get("parameters", BOTH)
    wanted = tuple(name in parameters for name in BOTH)
    assert runs(model, batch) == [wanted] * 2
    assert not_plain(model) == {}
    ranks = {each.r["default"] for each in model.modules() if experts.is_wrapper(each)}
    assert ranks == ({2, 4} if "rank_pattern" in options else {options.get("r", 4)})


@pytest.mark.parametrize("kind", [QWEN, GPT])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
def test_every_precision_is_no_worse_than_eager(way: str, kind: str, runs: Runs) -> None:
    dtype, wide_adapters, autocast = WAYS[way]
    base = tiny_model(kind, dtype=dtype)
    eager_model, model, batch = beside(with_adapters(base, wide_adapters=wide_adapters))
    wide = copy.deepcopy(eager_model).double()
    eager, ours = (training_step(m, batch, autocast=autocast) for m in (eager_model, model))
    assert ours["loss"].dtype == eager["loss"].dtype
    assert runs(model, batch) == [(True, True)] * 2
    assert_right(ours, eager, training_step(wide, batch), dtype if not autocast else torch.bfloat16)


def second(model: Any) -> None:
    if peft.__version__.startswith("0.18."):
        pytest.skip("PEFT 0.18 has one adapter of parameters")
    torch.manual_seed(2)
    config = copy.deepcopy(model.peft_config["default"])
    config.r, config.lora_alpha = 3, 7
    model.add_adapter("second", config)


def switched(model: Any) -> None:
    second(model)
    model.set_adapter("second")


def both_active(model: Any) -> None:
    second(model)
    model.base_model.set_adapter(["default", "second"])


def hooked(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("layers.0.mlp.experts.base_layer.base_layer"):
            module.register_forward_hook(lambda _, args, output: 2 * output)


def of_experts(name: str, value: object) -> Callable[[Any], None]:
    """A change of an attribute of all experts."""

    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "is_transposed") and not experts.is_wrapper(module):
                setattr(module, name, value)

    return change


PEFTS = [(False, False)] * 2  # PEFT's own forward, around experts on kernels
CHANGES: dict[str, tuple[Callable[[Any], object], str, list[tuple[bool, bool]]]] = {
    "second adapter, not active": (second, "", [(True, True)] * 2),
    "switched": (switched, "", [(True, True)] * 2),
    "merged and unmerged": (unmerged, "", [(True, True)] * 2),
    "several active adapters": (both_active, "2 active adapters", PEFTS),
    "hook of experts": (hooked, "", [(False, False), (True, True)]),
    "sharded": (of_experts("_is_expert_parallel", True), "", []),  # as by Transformers
    "another activation": (of_experts("act_fn", nn.Tanh()), "", []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_call_asks_whether_adapters_are_plain(name: str, runs: Runs) -> None:
    change, reason, found = CHANGES[name]
    eager, model, batch = pair()
    training_step(model, batch)
    for each in (eager, model):
        change(each)
    assert_same(model, eager, batch)
    assert runs(model, batch) == found
    assert not_plain(model) == ({reason: 4} if reason else {})
    if reason:
        assert f"4 in PEFT's own forward: {reason}" in str(patch_status(model))


def test_the_status_names_experts_of_another_implementation(runs: Runs) -> None:
    model = apply_patch(tiny_model(ROWS["qwen3_moe"]))
    model.set_experts_implementation("batched_mm")
    assert not runs(model, tiny_batch(model))
    number = count_layers(model)["experts"]
    said = f"{number} experts in Transformers' own code: batched_mm"
    assert number > 0
    assert said in str(patch_status(model))
    model.set_experts_implementation("eager")
    assert len(runs(model, tiny_batch(model))) == number
    assert "batched_mm" not in str(patch_status(model))


@pytest.mark.parametrize("first", ["patch", "adapters"])
@pytest.mark.parametrize("layers", [True, ["experts"], ["lora", "experts"], ["lora"]], ids=str)
def test_the_named_layers_are_on_kernels(layers: Any, first: str, runs: Runs) -> None:
    """Whichever comes first, and whatever names came before."""
    base = tiny_model(QWEN).double()
    eager = with_adapters(copy.deepcopy(base))
    if first == "patch":
        model = with_adapters(apply_patch(base, layers=layers))
    else:
        model = apply_patch(apply_patch(copy.deepcopy(eager)), layers=layers)
    batch, is_named = batch_of(eager), layers is True or "experts" in layers
    assert_same(model, eager, batch)
    assert runs(model, batch) == [(True, True)] * 2 * is_named
    counts = {name: count for name, count in count_layers(model).items() if count}
    assert counts.get("experts", 0) == 2 * is_named
    assert layers is True or counts.keys() <= {*layers}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["float32", "autocast"])
def test_checkpoints_give_the_same_bits(way: str, reentrant: bool, runs: Runs) -> None:
    dtype, wide_adapters, autocast = WAYS[way]
    model = with_adapters(tiny_model(QWEN, dtype=dtype), wide_adapters=wide_adapters)
    apply_patch(model)
    batch = batch_of(model)
    expected = training_step(model, batch, autocast=autocast)
    with_checkpoints(model, reentrant)
    assert_same_bits(training_step(model, batch, autocast=autocast), expected)
    assert len(runs(model, batch)) == 4  # each layer twice


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch, record: Callable[..., list[Any]]) -> list[Any]:
    """Those of each call of the operator; every row is a long one."""
    if checks.TOP_HOOKS is None:
        pytest.skip("torch 2.6 does not tell its hooks")
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 0)
    monkeypatch.setattr(chunk_sizes, "SLICE_BYTES", 16384)
    slices: list[int | None] = []
    record(experts, "run_experts", lambda *arguments: slices.extend(arguments[7:]))  # not a probe's
    return slices


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [QWEN, GPT])
def test_long_rows_in_slices(kind: str, reentrant: bool, slices: list[int | None]) -> None:
    """Routers choose the same experts: the loss of both is that of eager."""
    eager_model, model, batch = beside(with_adapters(tiny_model(kind)))
    wide = copy.deepcopy(eager_model).double()
    eager, truth = (training_step(each, batch) for each in (eager_model, wide))
    with_checkpoints(model, reentrant)
    assert_right(training_step(model, batch), eager, truth)
    assert len(slices) == 4
    tokens = batch["input_ids"].numel()
    assert all(each is not None and each < tokens for each in slices)


def test_long_rows_without_checkpoints_run_at_once(slices: list[int | None]) -> None:
    _, model, batch = pair()
    training_step(model, batch)
    assert slices == [None] * 2


def test_full_training_of_long_rows_in_slices(slices: list[int | None]) -> None:
    eager_model = tiny_model(QWEN)
    model, batch = apply_patch(copy.deepcopy(eager_model)), tiny_batch(eager_model)
    wide = copy.deepcopy(eager_model).double()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_right(step(model, batch), step(eager_model, batch), step(wide, batch))
    assert None not in slices


@pytest.mark.parametrize("kind", [QWEN, "qwen2_moe", GPT])
@pytest.mark.parametrize("trained", ["router", "all", "nothing but adapters"])
def test_routers_and_their_loss(trained: str, kind: str) -> None:
    """qwen2_moe has shared experts beside those of the router."""
    eager, model, _ = pair(kind)
    batch = {**batch_of(eager), **router_arguments(eager.get_base_model())}
    steps = []
    for each in (eager, model):
        for name, parameter in each.named_parameters():
            is_router = ".router." in name or ".gate." in name
            is_wanted = trained == "all" or (trained == "router" and is_router)
            parameter.requires_grad_("lora_" in name or is_wanted)
        steps.append(step(each.train(), batch))
    assert_same_step(*reversed(steps))


@pytest.mark.parametrize("kind", [QWEN, GPT])
@pytest.mark.parametrize("autocast", [False, True])
def test_experts_that_train_themselves(autocast: bool, kind: str, runs: Runs) -> None:
    eager_model = tiny_model(kind)
    model, batch = apply_patch(copy.deepcopy(eager_model)), tiny_batch(eager_model)
    wide = copy.deepcopy(eager_model).double()
    eager, ours = (step(each, batch, autocast=autocast) for each in (eager_model, model))
    assert_right(ours, eager, step(wide, batch), torch.bfloat16 if autocast else torch.float32)
    assert runs(model, batch) == [(False, False)] * 2
