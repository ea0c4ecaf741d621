"""LoRA layers on kernels: which projections are one function, that training steps are no worse than
PEFT's in any precision, and the bytes that layers keep for the backward pass.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from lora_models import (
    ALL,
    LAYER,
    MARKS,
    MLP,
    OUT,
    QKV,
    ROWS,
    WAYS,
    Calls,
    Groups,
    adapted,
    assert_same,
    batch_of,
    beside,
    check_precision,
    copies,
    first,
    lora_layers,
    training_step,
)
from slow_cases import slow_but
from tiny_models import tiny_model
from torch import Tensor, nn
from training_step import Products, assert_right, assert_same_step, step, with_checkpoints
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from liger_patch import apply_patch, patch_status
from liger_patch.layers.lora import computed_together
from liger_patch.layers.replace import count_layers

pytestmark = MARKS

TARGETS: dict[str, tuple[tuple[str, ...], Groups]] = {
    "all": (ALL, LAYER),
    "q and v": (("q_proj", "v_proj"), [("q_proj", "v_proj")]),
    "attention": ((*QKV, *OUT), [QKV, OUT]),
    "one": (("k_proj",), [("k_proj",)]),
    "feed-forward": (MLP, [MLP]),
    "gate alone": (("gate_proj",), [("gate_proj",)]),
    "gate and down": (("gate_proj", "down_proj"), [("gate_proj",), ("down_proj",)]),
}


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", slow_but(["qwen3"], ["llama", "qwen3", "gemma3_text"]))
def test_projections_of_one_input_are_one_function(
    model_type: str, targets: str, calls: Calls
) -> None:
    """And PEFT's own forwards do not run."""
    names, groups = TARGETS[targets]
    base = tiny_model(model_type).double()
    eager, model, batch = beside(adapted(base=base, target_modules=list(names)))
    layers = base.config.num_hidden_layers
    assert count_layers(model)["lora"] == len(names) * layers
    status = str(patch_status(model))
    assert f"{len(names) * layers} lora" in status
    assert "PEFT's own forward" not in status
    assert_same(model, eager, batch)
    assert calls.of_step(model, batch) == (groups * layers, [])


LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {  # siblings of linear attention, and the others
    "qwen3_5_text": (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("out_proj",)),
    "qwen3_next": (("in_proj_qkvz", "in_proj_ba"), ("out_proj",)),
    "olmo_hybrid": (("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), ("o_proj",)),
}
SOME = {"all": slice(None), "some": slice(0, None, 2), "one": slice(1)}


@pytest.mark.skipif("qwen3_5_text" not in ROWS, reason="Transformers 5.0 keeps its own layers")
@pytest.mark.parametrize("part", SOME)
@pytest.mark.parametrize("model_type", sorted(LINEAR.keys() & ROWS.keys()))
def test_projections_of_linear_attention_are_one_function(
    model_type: str, part: str, calls: Calls
) -> None:
    siblings, out = LINEAR[model_type]
    siblings = siblings[SOME[part]]
    base = tiny_model(model_type)
    net = next(n for n, m in base.named_modules() if type(m).__name__.endswith("GatedDeltaNet"))
    names = [f"{net}.{name}" for name in (*siblings, *out)]
    eager, model, batch = beside(adapted(base=base, target_modules=names))
    wide = copy.deepcopy(eager).double()
    assert_right(*(training_step(each, batch) for each in (model, eager, wide)))
    assert calls.of_step(model, batch) == ([siblings, out], [])


def test_a_projection_that_is_split_behind_runs_singly(calls: Calls) -> None:
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    base = tiny_model("phi3").double()
    eager, model, batch = beside(adapted(base=base, target_modules=list(names)))
    assert_same(model, eager, batch)
    assert calls.of_step(model, batch) == ([(name,) for name in names] * 2, [])


def test_projections_of_other_widths_are_not_computed_together(calls: Calls) -> None:
    _, model, _ = copies()
    attention = first(model, "self_attn")
    k_proj, width = attention.k_proj, attention.k_proj.in_features // 2
    for each in (k_proj.base_layer, k_proj.lora_A["default"]):
        each.weight = torch.nn.Parameter(each.weight.detach()[:, :width])
    k_proj.in_features = width
    x = torch.randn(2, 3, 2 * width).double()
    with computed_together(attention):
        attention.q_proj(x)
        attention.k_proj(x[..., :width])
    assert calls.taken(model) == ([("q_proj",), ("k_proj",)], [])


def test_threads_have_siblings_of_their_own(calls: Calls) -> None:
    """Several forward passes of one model at the same time."""
    model = apply_patch(adapted())
    batch = batch_of(model)
    expected = model(**batch).loss

    def run(_: int) -> list[Tensor]:
        return [model(**batch).loss for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(run, range(4)))
    assert all(torch.equal(loss, expected) for each in losses for loss in each)


def test_an_input_that_a_hook_changes_in_place() -> None:
    """Between two projections that are computed together."""

    def doubles(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].mul_(2)

    eager, model, batch = copies()
    for each in (eager, model):
        first(each, "v_proj").register_forward_pre_hook(doubles)
    with torch.no_grad():
        expected, loss = (each(**batch).loss for each in (eager, model))
    torch.testing.assert_close(loss.float(), expected.float())


def test_an_exception_within_an_attention_leaves_nothing_behind(calls: Calls) -> None:
    eager, model, batch = copies()
    attention = first(model, "self_attn")

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


@pytest.mark.filterwarnings("ignore:liger_patch. PEFT.s own forward runs")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_every_precision_is_no_worse_than_eager(
    model_type: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, wide_adapters, _ = WAYS[way]
    eager = adapted(model_type, dtype=dtype, wide_adapters=wide_adapters)
    check_precision(eager, way, monkeypatch)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["float32", "autocast"])
def test_checkpoints(way: str, reentrant: bool, calls: Calls) -> None:
    """No worse than eager, the same bits as without, and not one product more than eager."""
    dtype, wide_adapters, autocast = WAYS[way]
    eager_model = adapted(dtype=dtype, wide_adapters=wide_adapters)
    wide, model = copy.deepcopy(eager_model).double(), apply_patch(copy.deepcopy(eager_model))
    plain, batch = apply_patch(copy.deepcopy(eager_model)), batch_of(eager_model)
    for each in (eager_model, model):
        with_checkpoints(each, reentrant)
    results, products = [], []
    for each in (eager_model, model):
        calls.clear()
        results.append(training_step(each, batch, autocast=autocast))
    groups, by_peft = calls.taken(model)
    assert (len(groups), by_peft) == (2 * len(LAYER) * 2, [])  # each layer twice
    expected = training_step(plain, batch, autocast=autocast)
    assert_same_bits(results[1], expected)
    assert_right(results[1], results[0], training_step(wide, batch), dtype)
    for each in (eager_model, model):
        with Products(thin=4) as counted:  # those of a base: adapters have thin ones
            training_step(each, batch, autocast=autocast)
        products.append(counted.number)
    assert 0 < products[1] <= products[0]


def test_bases_that_train_and_have_a_bias(calls: Calls) -> None:
    eager = adapted(base=tiny_model().double())
    for name, layer in lora_layers(eager).items():
        if name.endswith(("q_proj", "down_proj")):
            layer.base_layer.bias = nn.Parameter(torch.ones(layer.out_features).double())
    eager, model, batch = beside(eager)
    assert_same(model, eager, batch)
    assert calls.of_step(model, batch) == (LAYER * 2, [])
    assert_same_step(*(step(each.requires_grad_(), batch) for each in (model, eager)))


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_dropout(rate: float, calls: Calls) -> None:
    """In training only; the same seed gives the same step, under checkpoints too."""
    eager, model, batch = copies(lora_dropout=rate)
    for each in (eager, model):
        each.eval()
    truth, ours = eager(**batch).loss, model(**batch).loss
    assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    calls.clear()
    once, again = training_step(model, batch), training_step(model, batch)
    groups, by_peft = calls.taken(model)
    if rate == 1.0:
        assert (groups, len(by_peft)) == ([], 2 * 2 * len(ALL))
    else:
        assert (groups, by_peft) == (LAYER * 4, [])
        assert not torch.equal(once["loss"], ours)  # type: ignore[arg-type]
    assert_same_bits(again, once)
    assert_same_bits(training_step(with_checkpoints(model, False), batch), once)
    assert torch.equal(model.eval()(**batch).loss, ours)


DOCS = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 64}
LLAMA_1B = LlamaConfig(hidden_size=2048, intermediate_size=8192, head_dim=64, **HEADS)
QWEN_8B = Qwen3Config(hidden_size=4096, intermediate_size=12288, head_dim=128, **HEADS)


def kept_bytes(config: PretrainedConfig, layers: int, tokens: int) -> int:
    """Return what autograd saves in a step of so many layers, without weights."""
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = adapted(base=model, r=16, target_modules="all-linear", init_lora_weights=True)
    apply_patch(model.train())
    ids = torch.arange(tokens)[None] % config.vocab_size
    weights = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    found = (each.untyped_storage().nbytes() for at, each in kept.items() if at not in weights)
    return sum(found)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="its attention of grouped heads on a CPU keeps the scores",
)
@pytest.mark.parametrize(
    ("config", "said"),
    [(LLAMA_1B, "Llama-3.2-1B keeps 59.7 kB"), (QWEN_8B, "Qwen3-8B 113.0 kB")],
    ids=["llama", "qwen3"],
)
def test_bytes_of_a_token_and_layer(config: PretrainedConfig, said: str) -> None:
    """What a second layer and 64 more tokens add: without the head, and without cast adapters."""
    sizes = {(n, t): kept_bytes(config, n, t) for n in (1, 2) for t in (64, 128)}
    more = [sizes[n, 128] - sizes[n, 64] for n in (1, 2)]
    kilobytes = (more[1] - more[0]) / 64 / 1000
    assert said.endswith(f" {kilobytes:.1f} kB")
    assert said in " ".join(DOCS.split())
