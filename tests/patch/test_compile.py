"""torch.compile of a patched model: eager's loss and gradients, and the backbone in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import MARKS, Graphs
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from trainers import QUIET
from training_step import joined, step, tell_apart
from transformers import LlamaForCausalLM, PreTrainedModel

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.deferred.traced import TRACES_LOGITS, TracedLogits

ROWS = {row.model_type: row for row in registry.available()}
pytestmark = MARKS
IGNORED = (0.0, 0.3, 0.9, 1.0)  # shares of the labels


def make_model(model_type: str = "llama", *, patch: bool = True) -> PreTrainedModel:
    """With one layer, for the sake of the compiler's time."""
    model = tiny_model(ROWS[model_type]).double()
    del model.model.layers[1:]
    return apply_patch(model) if patch else model


def batch_of(model: nn.Module, seed: int = 0, ignored: float = 0.3) -> Batch:
    batch = tiny_batch(model, seed=seed, ignored=ignored)
    if ignored == 1.0:
        batch["labels"].fill_(-100)
    return batch


def assert_same_step(ours: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> None:
    truth, ours = tell_apart(truth, ours)
    assert_no_worse(ours, truth, truth, torch.float32)


def is_deferred(logits: Tensor) -> bool:
    """Return whether logits that have left a graph, or were in none, have no values yet."""
    deferred = logits.deferred if isinstance(logits, TracedLogits) else logits
    return isinstance(deferred, DeferredLogits) and not deferred.is_computed


def run(
    model: nn.Module, batch: Batch, call: Callable[..., Any] | None = None
) -> dict[str, Tensor | None]:
    """Loss and gradients of `call`, which is `model` compiled, or of `model`."""
    model.zero_grad()
    loss = (model if call is None else call)(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        ("llama", "eager"),
        pytest.param("gemma2", "eager", marks=pytest.mark.slow),
        pytest.param("llama", "aot_eager", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "eager", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ignored_labels_gives_the_loss_and_gradients_of_eager(
    model_type: str, backend: str
) -> None:
    model, uncompiled = make_model(model_type), make_model(model_type)
    eager, wide = (make_model(model_type, patch=False) for _ in range(2))
    graphs = Graphs(backend)
    compiled = torch.compile(model, backend=graphs)
    counts = []
    for seed, ignored in enumerate(IGNORED):
        batch = batch_of(model, seed, ignored)
        ours = run(model, batch, compiled)
        counts.append(len(graphs.linears))
        assert patch_status(model).fused
        assert_same_step(ours, run(uncompiled, batch))
        if ignored < 1.0:  # eager's mean of no token is nan
            results = joined(step(wide, batch), run(eager, batch), ours)
            assert_no_worse(results[2], results[1], results[0], torch.float32)
        else:
            assert ours["loss"].item() == 0.0
    assert len(set(counts)) == 1, "compiled again for another number of ignored labels"
    if model_type != "qwen3_moe":  # whose experts break the graph
        layers = sum(type(module) is nn.Linear for module in model.modules())
        assert [count for count in graphs.linears if count] == [layers - 1]  # all but the head's


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_backbone_is_in_one_graph_and_the_head_in_none(model_type: str) -> None:
    model = make_model(model_type)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    batch = batch_of(model)
    for _ in range(2):
        logits = compiled(**batch).logits
        assert is_deferred(logits)
    layers = sum(type(module) is nn.Linear for module in model.modules())
    assert [count for count in graphs.linears if count] == [layers - 1]
    expected = make_model(model_type)(**batch).logits
    torch.testing.assert_close(logits.detach(), expected.detach(), rtol=0, atol=0)


@pytest.mark.slow
def test_calls_with_and_without_labels_alternate() -> None:
    model, uncompiled = make_model(), make_model()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    counts = []
    for seed in range(3):
        batch = batch_of(model, seed)
        assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
        batch.pop("labels")
        outputs, expected = compiled(**batch), uncompiled(**batch)
        assert outputs.loss is None
        assert not is_deferred(outputs.logits)
        torch.testing.assert_close(outputs.logits, expected.logits)
        counts.append(len(graphs.linears))
    assert len(set(counts)) == 1, "compiled again for a kind of call that was compiled before"


@pytest.mark.slow
def test_the_flag_is_read_at_every_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, uncompiled = make_model(), make_model()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    batch = batch_of(model)
    counts = []
    for _ in range(2):
        for flag, deferred in ((None, True), ("1", False), ("0", True)):
            if flag is None:
                monkeypatch.delenv("LIGER_PATCH_RETURN_LOGITS", raising=False)
            else:
                monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", flag)
            assert is_deferred(compiled(**batch).logits) is deferred
            assert patch_status(model).fused is deferred
            assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
        counts.append(len(graphs.linears))
    assert counts[0] == counts[1]


def compile_in_place(model: PreTrainedModel, graphs: Graphs) -> None:
    model.compile(backend=graphs)


def compile_backbone(model: PreTrainedModel, graphs: Graphs) -> None:
    model.model.compile(backend=graphs)


@pytest.mark.parametrize(
    ("compile_it", "patch_first"),
    slow_but(
        [(compile_backbone, True)],
        [(compile_in_place, True), (compile_backbone, True), (compile_in_place, False)],
    ),
)
def test_a_model_that_is_compiled_in_place_trains_as_uncompiled(
    compile_it: Callable[[PreTrainedModel, Graphs], None], patch_first: bool
) -> None:
    model = make_model(patch=patch_first)
    graphs = Graphs()
    compile_it(model, graphs)
    apply_patch(model)
    for seed in range(2):
        batch = batch_of(model, seed)
        assert_same_step(run(model, batch), run(make_model(), batch))
    assert patch_status(model).fused
    layers = sum(type(module) is nn.Linear for module in model.modules())
    assert [count for count in graphs.linears if count] == [layers - 1]


def test_a_compiled_model_is_to_be_patched_before() -> None:
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        apply_patch(torch.compile(make_model(patch=False), backend=Graphs()))


@pytest.mark.slow
def test_autocast_is_no_worse_than_eager() -> None:
    results = {}
    for name in ("eager", "ours"):
        model = make_model(patch=name == "ours").float()
        forward = torch.compile(model, backend=Graphs()) if name == "ours" else model
        with torch.autocast("cpu", torch.bfloat16):
            results[name] = run(model, batch_of(model), forward)
    assert patch_status(model).fused
    truth = step(make_model(patch=False), batch_of(model))
    truth, eager, ours = joined(truth, results["eager"], results["ours"])
    assert_no_worse(ours, eager, truth, torch.bfloat16)


@pytest.mark.slow
def test_trainer_trains_a_compiled_model_as_the_uncompiled_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    runs = []
    for torch_compile in (False, True):
        model = make_model()
        batch = tiny_batch(model, batch=8)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            torch_compile=torch_compile,
            torch_compile_backend="eager" if torch_compile else None,
            **QUIET,
        )
        samples = [{name: value[i] for name, value in batch.items()} for i in range(8)]
        trainer = Trainer(model, arguments, train_dataset=samples)
        trainer.train()
        history = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
        runs.append(torch.tensor(history, dtype=torch.float64))
        assert patch_status(model).fused
    assert runs[0].shape == (3, 2)
    assert_no_worse({"": runs[1]}, {"": runs[0]}, {"": runs[0]}, torch.float32)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_that_is_compiled_on_its_own(when: str) -> None:
    """As accelerate's regional compilation leaves it."""
    model: Any = make_model(patch=False)
    batch = tiny_batch(model)
    truth = step(model, batch)
    if when == "after":
        apply_patch(model, layers=False)
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    if when == "before":
        apply_patch(model, layers=False)
    ours = {name.replace("_orig_mod.", ""): value for name, value in step(model, batch).items()}
    assert patch_status(model).fused
    truth, ours = tell_apart(truth, ours)
    torch.testing.assert_close(ours, truth)
    logits = model(**batch).logits
    torch.testing.assert_close(logits, revert_patch(model)(**batch).logits)


GRAPH = pytest.mark.skipif(not TRACES_LOGITS, reason="needs torch 2.11: TRACES_LOGITS")


class Counted:
    """A compiled function, and the products in each graph that has run."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.graphs, self.ran = Graphs("aot_eager"), set()
        self.call = torch.compile(function, backend=self.backend, fullgraph=True, **options)

    def backend(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        run_graph, number = self.graphs(graph, inputs), len(self.graphs.linears)

        def run_and_note(*args: Any) -> Any:
            self.ran.add(number)  # where a float turns out to be a constant, it compiles twice
            return run_graph(*args)

        return run_and_note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def count(self) -> int:
        return len(self.ran)


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


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).logits.float()
    labels = batch["labels"][:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels)


def loss_and_values(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + outputs.logits.logsumexp(-1).mean()


def written_logits(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    copy, part = outputs.logits * 1.0, outputs.logits[:, :2]
    part.mul_(2.0)
    return outputs.loss + outputs.logits.square().mean() + copy.mean()


def sizes_alone(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    logits = outputs.logits
    return outputs.loss * logits.shape[-1] * logits.dim() / logits.element_size()


def values_behind_a_break(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    torch._dynamo.graph_break()
    return outputs.loss + outputs.logits.logsumexp(-1).mean()


@GRAPH
@pytest.mark.parametrize(
    ("of_user", "products", "fullgraph"),
    slow_but(
        [(own_loss, 0, True), (values_behind_a_break, 1, False)],
        [
            (own_loss, 0, True),
            (loss_and_values, 1, True),
            (written_logits, 2, True),
            (sizes_alone, 0, True),
            (values_behind_a_break, 1, False),
        ],
    ),
)
def test_logits_within_a_graph_are_those_of_eager(
    of_user: Callable[..., Tensor], products: int, fullgraph: bool
) -> None:
    """Nobody reads them: no product; somebody reads them: the values of an uncompiled call."""
    model, uncompiled = make_model("gemma2"), make_model("gemma2")
    batch, graphs = batch_of(model), Graphs()
    compiled = torch.compile(partial(of_user, model), backend=graphs, fullgraph=fullgraph)
    results = []
    for each, call in ((model, compiled), (uncompiled, partial(of_user, uncompiled))):
        loss = call(batch)
        loss.backward()
        gradients = {name: p.grad for name, p in each.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
    assert_same_step(*results)
    layers = sum(type(module) is nn.Linear for module in model.modules())
    assert sum(graphs.linears) == layers - 1 + products
    assert patch_status(model).fused


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
def test_a_layer_as_wide_as_the_vocabulary_is_not_the_head() -> None:
    models = []
    for _ in range(2):
        config = tiny_model(ROWS["llama"]).config
        config.intermediate_size = config.vocab_size
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


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    file = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@GRAPH
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("option", "compiled_first"),
    slow_but(
        [("find_unused_parameters", True)],
        [
            (each, first)
            for each in ("find_unused_parameters", "static_graph")
            for first in (True, False)
        ],
    ),
)
def test_ddp_of_a_compiled_model_holds_no_logits(option: str, compiled_first: bool) -> None:
    model, uncompiled = make_model(), make_model()
    if compiled_first:
        call: Any = DistributedDataParallel(torch.compile(model, backend="eager"), **{option: True})
    else:
        call = torch.compile(DistributedDataParallel(model, **{option: True}), backend="eager")
    for seed in range(3):
        batch = batch_of(model, seed)
        model.zero_grad()
        outputs = call(**batch)
        outputs.loss.backward()
        ours = {n: p.grad for n, p in model.named_parameters()}
        assert is_deferred(outputs.logits)
        assert_same_step({"loss": outputs.loss.detach(), **ours}, run(uncompiled, batch))


def test_a_class_with_a_loss_function_of_its_own() -> None:
    class Own(LlamaForCausalLM):
        def loss_function(self, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            rows = logits[:, :-1].reshape(-1, logits.shape[-1])
            return nn.functional.cross_entropy(rows, labels[:, 1:].flatten())

    torch.manual_seed(0)
    model = Own(tiny_model(ROWS["llama"]).config).double()
    batch = batch_of(model)
    expected = run(model, batch)
    apply_patch(model, layers=False)
    assert_same_step(run(model, batch), expected)
    assert patch_status(model).fused
    revert_patch(model)
    assert_same_step(run(model, batch), expected)


@pytest.mark.parametrize(
    "model_type", slow_but(["t5"], ["t5", "m2m_100", "recurrent_gemma", "qwen2_audio"])
)
def test_models_whose_loss_dynamo_does_not_ask_for_break_the_graph(model_type: str) -> None:
    models = [apply_patch(tiny_model(ROWS[model_type]).float().eval()) for _ in range(2)]
    batch = tiny_batch(models[0])
    ours = run(models[0], batch, torch.compile(models[0], backend="eager"))
    truth = run(models[1], batch)
    assert patch_status(models[0]).fused is patch_status(models[1]).fused
    assert_same_step(ours, truth)


@GRAPH
@pytest.mark.slow
def test_what_dynamo_does_not_ask_for_is_nan() -> None:
    model, batch = make_model(), batch_of(make_model())

    def loss() -> Tensor:
        logits = model(**batch).logits
        criterion = nn.CrossEntropyLoss()
        return criterion(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))

    assert torch.compile(loss, backend="eager", fullgraph=True)().isnan()
