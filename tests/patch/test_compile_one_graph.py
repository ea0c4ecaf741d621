"""torch.compile of a patched model: backbone and loss are one graph, which the head is not in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_graphs import MARKS
from compiled_models import (
    GRAPH,
    IGNORED,
    ROWS,
    Counted,
    assert_same_step,
    batch_of,
    is_deferred,
    make_model,
    run,
)
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import nn
from training_step import joined, step
from transformers import LlamaForCausalLM

from liger_patch import apply_patch, patch_status

pytestmark = MARKS


@GRAPH
@pytest.mark.parametrize(
    "model_type",
    slow_but(["gemma2"], ["llama", "gemma2", "gemma3_text", "qwen3", "cohere", "granite"]),
)
def test_loss_and_backbone_are_one_graph(model_type: str) -> None:
    model, uncompiled = make_model(model_type), make_model(model_type)
    compiled = Counted(model)
    for seed, ignored in enumerate(IGNORED):
        batch = batch_of(model, seed, ignored)
        assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
        assert patch_status(model).fused
    assert compiled.count == 1, "compiled again for another number of ignored labels"
    layers = sum(type(module) is nn.Linear for module in model.modules())
    assert set(compiled.graphs.linears) == {layers - 1}, "the graph has a product of the head"
    logits = compiled(**batch).logits
    assert is_deferred(logits)
    with torch.no_grad():
        torch.testing.assert_close(logits + 0, uncompiled(**batch).logits + 0)


@GRAPH
@pytest.mark.slow
def test_one_graph_serves_every_length() -> None:
    model, uncompiled = make_model(), make_model()
    compiled = Counted(model, dynamic=True)
    for length in (9, 12, 17):
        batch = tiny_batch(model, length=length, ignored=0.3)
        assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
    assert compiled.count == 1


@GRAPH
@pytest.mark.parametrize(
    "options",
    slow_but(
        [],
        [
            {"label_smoothing": 0.1, "z_loss": 1e-3},
            {"reduction": "sum"},
            {"chunk_mib": 0.01},
            {"loss_average": "sequence"},
        ],
    ),
)
def test_options_reach_the_loss_of_a_graph(options: dict[str, Any]) -> None:
    model, uncompiled = (apply_patch(make_model(patch=False), **options) for _ in range(2))
    batch = batch_of(model)
    compiled = Counted(model)
    assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
    assert patch_status(model).fused


@GRAPH
@pytest.mark.parametrize("kind", slow_but(["packed"], ["items", "weights", "packed"]))
def test_arguments_of_a_loss_reach_it_in_a_graph(kind: str) -> None:
    model, uncompiled = make_model(), make_model()
    batch: dict[str, Any] = dict(batch_of(model))
    rows, length = batch["labels"].shape
    if kind == "items":
        batch["num_items_in_batch"] = torch.tensor(37)
    elif kind == "weights":
        batch["loss_weights"] = torch.rand(rows, length, dtype=torch.float64)
    else:
        batch["position_ids"] = torch.arange(length).remainder(5).expand(rows, length)
    compiled = Counted(model)
    for _ in range(2):
        assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
    assert compiled.count == 1
    assert patch_status(model).fused
    if kind == "items":
        batch["num_items_in_batch"] = torch.tensor(11)
        assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
        assert compiled.count == 1, "compiled again for another number of items"


@GRAPH
@pytest.mark.slow
def test_accumulated_steps_are_one_graph() -> None:
    model, uncompiled = make_model(), make_model()
    compiled = Counted(model)
    for call in (compiled, uncompiled):
        for seed in range(3):
            batch = batch_of(model, seed)
            call(**batch, num_items_in_batch=torch.tensor(40)).loss.backward()
    ours, truth = ({n: p.grad for n, p in m.named_parameters()} for m in (model, uncompiled))
    assert_same_step(ours, truth)
    assert compiled.count == 1


@GRAPH
def test_lora_trains_in_one_graph() -> None:
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        models.append(apply_patch(peft.get_peft_model(make_model(patch=False), config)))
    model, uncompiled = models
    compiled = Counted(model)
    batch = batch_of(model)
    ours, truth = run(model, batch, compiled), run(uncompiled, batch)
    assert sum(value is not None for value in ours.values()) > 10
    assert_same_step(ours, truth)
    assert compiled.count == 1
    assert patch_status(model).fused


def with_adapters(kind: str, model_type: str = "llama", **options: Any) -> Any:
    """Return a patched model whose head PEFT has wrapped."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "lm_head"], **options}
    if kind == "saved":
        options |= {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    config = peft.LoraConfig(init_lora_weights=False, **options)
    model = peft.get_peft_model(make_model(model_type, patch=False), config)
    if kind == "two":
        second = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        model.add_adapter("second", second)
        model.base_model.set_adapter(["default", "second"])
    if kind == "alone":
        model.requires_grad_(False)
        model.base_model.model.lm_head.requires_grad_()
    if kind == "merged":
        model.merge_adapter()
        model.get_input_embeddings().requires_grad_()
    return apply_patch(model)


@GRAPH
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")  # PEFT's, of gemma2
@pytest.mark.parametrize(
    ("kind", "model_type"),
    slow_but(
        [("saved", "llama")],
        [
            ("alone", "granite"),
            ("lora", "gemma2"),
            ("two", "llama"),
            ("merged", "llama"),
            ("saved", "llama"),
        ],
    ),
)
def test_a_head_that_peft_wraps_is_one_graph(kind: str, model_type: str) -> None:
    model, uncompiled = (with_adapters(kind, model_type) for _ in range(2))
    compiled = Counted(model)
    for seed, ignored in enumerate(IGNORED):
        batch = batch_of(model, seed, ignored)
        ours, truth = run(model, batch, compiled), run(uncompiled, batch)
        trained = [name for name, value in ours.items() if value is not None]
        assert any("lm_head" in name for name in trained) is (kind != "merged")
        assert_same_step(ours, truth)
        assert patch_status(model).fused
    assert compiled.count == 1, "compiled again for another number of ignored labels"
    logits = compiled(**batch).logits
    assert is_deferred(logits)
    torch.testing.assert_close(logits + 0, uncompiled(**batch).logits + 0)


@GRAPH
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:liger_patch computes ordinary logits")
def test_adapters_that_are_no_sum_of_products_break_the_graph() -> None:
    model, uncompiled = (with_adapters("lora", use_dora=True) for _ in range(2))
    batch = batch_of(model)
    ours = run(model, batch, torch.compile(model, backend="eager"))
    assert_same_step(ours, run(uncompiled, batch))
    assert "were read by" in str(patch_status(model).reason)


@GRAPH
@pytest.mark.slow
def test_ordinary_logits_are_one_graph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    model, uncompiled = make_model(), make_model()
    compiled = Counted(model)
    for seed, ignored in enumerate(IGNORED):
        batch = batch_of(model, seed, ignored)
        assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
        assert not patch_status(model).fused
    assert compiled.count == 1
    assert not is_deferred(compiled(**batch).logits)


@GRAPH
def test_evaluation_is_one_graph() -> None:
    model, uncompiled = make_model().eval(), make_model().eval()
    compiled, batch = Counted(model), batch_of(model)
    with torch.no_grad():
        ours, expected = compiled(**batch), uncompiled(**batch)
    torch.testing.assert_close(ours.loss, expected.loss)
    assert is_deferred(ours.logits)
    torch.testing.assert_close(ours.logits + 0, expected.logits + 0)
    assert not ours.logits.requires_grad


@GRAPH
@pytest.mark.slow
def test_a_layer_as_wide_as_the_vocabulary_is_not_the_head() -> None:
    models = []
    for _ in range(2):
        config = tiny_model(ROWS["llama"]).config
        config.intermediate_size = config.vocab_size
        config.num_hidden_layers = 1
        torch.manual_seed(0)
        models.append(apply_patch(LlamaForCausalLM(config).double(), layers=False))
    model, uncompiled = models
    batch = batch_of(model)
    assert_same_step(run(model, batch, Counted(model)), run(uncompiled, batch))
    assert patch_status(model).fused


@GRAPH
@pytest.mark.slow
def test_inductor_trains_as_uncompiled() -> None:
    model, uncompiled = make_model("gemma2").float(), make_model("gemma2").float()
    batch = batch_of(model)
    ours = run(model, batch, torch.compile(model, fullgraph=True))
    truth = step(make_model("gemma2", patch=False), batch)
    truth, eager, ours = joined(truth, run(uncompiled, batch), ours)
    assert_no_worse(ours, eager, truth, torch.float32)


@GRAPH
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's first one is
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_trains_as_eager_on_gpus(mode: str) -> None:
    device = torch.device("cuda")
    model, eager = (make_model("gemma2", patch=p).to(device, torch.bfloat16) for p in (True, False))
    batch = {name: value.to(device) for name, value in batch_of(model).items()}
    truth = step(make_model("gemma2", patch=False).to(device), batch)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3):  # CUDA graphs are recorded in the second call
        ours = run(model, batch, compiled)
    assert patch_status(model).fused
    assert_no_worse(ours, run(eager, batch), truth, torch.bfloat16)
    assert is_deferred(compiled(**batch).logits)  # last: a CUDA graph's next call writes over ours
