"""LoRA layers on kernels: which projections are computed together, as one function."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from lora_models import (
    ALL,
    LAYER,
    MARKS,
    MLP,
    OUT,
    QKV,
    ROWS,
    Calls,
    Groups,
    adapted,
    assert_same,
    batch_of,
    copies,
    first,
)
from slow_cases import slow_but
from tiny_models import tiny_model
from torch import Tensor, nn

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
    base = tiny_model(ROWS[model_type]).double()
    eager = adapted(base=base, target_modules=list(names))
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    layers = base.config.num_hidden_layers
    assert count_layers(model)["lora"] == len(names) * layers
    status = str(patch_status(model))
    assert f"{len(names) * layers} lora" in status
    assert "PEFT's own forward" not in status
    assert_same(model, eager, batch)
    assert calls.of_step(model, batch) == (groups * layers, [])


def test_a_projection_that_is_split_behind_runs_singly(calls: Calls) -> None:
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    eager = adapted(base=tiny_model(ROWS["phi3"]).double(), target_modules=list(names))
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
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
        layer = first(each, "v_proj")
        layer.register_forward_pre_hook(doubles_in_place)
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


def test_one_row_and_no_rows() -> None:
    _, model, _ = copies()
    layer = first(model, "q_proj")
    for shape in ((32,), (0, 32), (2, 0, 32)):
        y = layer(torch.randn(shape).double())
        assert y.shape == (*shape[:-1], layer.out_features)
