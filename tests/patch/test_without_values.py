"""Calls that run without values: make_fx and torch.export record the fused loss and no logits, and
FakeTensorMode gives the shapes of a training step that makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from compiled_models import GRAPH, ROWS, assert_same_step, batch_of, is_deferred, make_model, run
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_step import Step, joined, step, widened
from transformers import PreTrainedModel
from untested_classes import make_model as make_untested

from liger_patch import apply_patch, patch_status

MODELS = slow_but(["gemma2"], ["llama", "gemma2", "cohere", "qwen3"])
EXPORTS = pytest.mark.filterwarnings(
    "ignore:.*get_attr",  # torch 2.6
    "ignore:While compiling, we found certain side effects",  # the status of a strict export
)
MODES = slow_but(["symbolic"], ["fake", "symbolic"])


def are_logits(values: Iterable[Any]) -> list[bool]:
    """Return for each tensor of two dimensions or more whether it is (..., V) of a tiny model."""
    tensors = [each for each in values if isinstance(each, Tensor) and each.dim() > 1]
    return [each.shape[-1] == 131 for each in tensors]


class Made(TorchDispatchMode):
    """Whether an operation has returned logits."""

    logits = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.logits |= any(are_logits(tree_leaves(result)))
        return result


def assert_fused(graph: GraphModule) -> None:
    """Assert that a graph has the operator once, and no logits."""
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("liger_patch.linear_cross_entropy.default") == 1
    made = are_logits(tree_leaves([node.meta.get("val") for node in graph.graph.nodes]))
    assert len(made) > 10
    assert not any(made)


def assert_no_worse_than_eager(ours: Step, eager: PreTrainedModel, inputs: Any) -> None:
    batch = {"input_ids": inputs[0], "labels": inputs[1], "use_cache": False}
    truth, results, ours = joined(step(eager, batch), run(eager, batch), ours)
    assert_no_worse(ours, results, truth, torch.float32)


def text_of(model: nn.Module, **options: Any) -> tuple[Tensor, Tensor]:
    batch = tiny_batch(model, batch=1, **options)
    return batch["input_ids"], batch["labels"]


def named(values: Any, model: nn.Module) -> Step:
    loss, *gradients = values
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = dict.fromkeys(name for name, _ in model.named_parameters())
    return {"loss": loss.detach(), **frozen, **dict(zip(names, gradients, strict=True))}


def recorded(function: Callable[..., Any], mode: Any, *inputs: Tensor) -> GraphModule:
    # the parameters are not among the inputs
    return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)


def training_step(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """Return a function that returns the loss and the gradients of all parameters that have one."""

    def function(input_ids: Tensor, labels: Tensor) -> Any:
        loss = model(input_ids, labels=labels, use_cache=False, **options).loss
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return loss, *torch.autograd.grad(loss, trained)

    return function


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", MODELS)
def test_make_fx_records_a_training_step_without_logits(model_type: str, mode: str) -> None:
    model, eager = make_model(model_type), make_model(model_type, patch=False)
    graph = recorded(training_step(model), mode, *text_of(model))
    assert patch_status(model).fused
    assert_fused(graph)
    for seed, length in enumerate((9, 9 if mode == "fake" else 14)):
        inputs = text_of(model, seed=seed, length=length, ignored=0.4 * seed)
        assert_no_worse_than_eager(named(graph(*inputs), model), eager, inputs)
    input_ids, labels = text_of(model)
    assert graph(input_ids, torch.full_like(labels, -100))[0] == 0.0


@pytest.mark.parametrize("model_type", slow_but(["t5"], ["t5", "m2m_100"]))
def test_a_loss_that_a_model_computes_itself_is_recorded_too(model_type: str) -> None:
    model, eager = (tiny_model(ROWS[model_type]).eval() for _ in range(2))
    apply_patch(model)
    graph = recorded(training_step(model), "symbolic", *text_of(model))
    assert_fused(graph)
    inputs = text_of(model, seed=1, length=14)
    batch = {"input_ids": inputs[0], "labels": inputs[1], "use_cache": False}
    truth = step(widened(eager), batch)
    truth, results, ours = joined(truth, run(eager, batch), named(graph(*inputs), model))
    assert_no_worse(ours, results, truth, torch.float32)


@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"loss_average": "sequence"}],
        [
            {"label_smoothing": 0.1, "z_loss": 1e-3},
            {"reduction": "sum"},
            {"loss_average": "sequence"},
        ],
    ),
)
def test_options_reach_the_loss_that_make_fx_records(options: dict[str, Any]) -> None:
    model, other = (apply_patch(make_model(patch=False), **options) for _ in range(2))
    inputs = text_of(model)
    graph = recorded(training_step(model), "symbolic", *inputs)
    assert_fused(graph)
    assert_same_step(named(graph(*inputs), model), named(training_step(other)(*inputs), other))


@pytest.mark.parametrize(
    "read",
    [lambda logits: logits, lambda logits: logits.float()[:, 1:], lambda logits: logits.exp()],
    ids=["returned", "recorded", "read"],
)
@pytest.mark.parametrize("mode", MODES)
def test_logits_that_a_graph_returns_are_computed_there(read: Any, mode: str) -> None:
    model = make_model("gemma2")

    def loss_and_logits(input_ids: Tensor, labels: Tensor) -> Any:
        outputs = model(input_ids, labels=labels, use_cache=False)
        return outputs.loss, read(outputs.logits)

    graph = recorded(loss_and_logits, mode, *text_of(model))
    inputs = text_of(model, seed=1)
    ours, truth = graph(*inputs), loss_and_logits(*inputs)
    assert type(ours[1]) is Tensor
    torch.testing.assert_close(ours, (truth[0], truth[1] + 0))


def test_make_fx_records_ordinary_logits_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    model = make_model()
    inputs = text_of(model)
    graph = recorded(training_step(model), "symbolic", *inputs)
    assert patch_status(model).reason == "LIGER_PATCH_RETURN_LOGITS=1"
    assert_no_worse_than_eager(named(graph(*inputs), model), make_model(patch=False), inputs)


class Loss(nn.Module):
    """What is exported: the loss of a patched model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids, labels=labels, use_cache=False).loss


@EXPORTS
@pytest.mark.parametrize("model_type", MODELS)
def test_an_exported_loss_trains_without_logits(model_type: str) -> None:
    model, eager = make_model(model_type), make_model(model_type, patch=False)
    tokens = torch.export.Dim("tokens", min=4, max=64)
    shapes = ({1: tokens}, {1: tokens})
    program = torch.export.export(Loss(model), text_of(model), dynamic_shapes=shapes, strict=False)
    assert patch_status(model).fused
    assert_fused(program.graph_module)
    inputs = text_of(model, seed=1, length=14)
    assert_no_worse_than_eager(trained(program, *inputs), eager, inputs)


def trained(program: torch.export.ExportedProgram, *inputs: Tensor) -> Step:
    """Return the loss and the gradients that the program of a ``Loss`` has."""
    module: Any = program.module()
    loss = module(*inputs)
    loss.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in module.named_parameters()}
    return {"loss": loss.detach(), **gradients}


@EXPORTS
@GRAPH
@pytest.mark.parametrize("model_type", slow_but(["llama"], ["llama", "qwen3"]))
def test_a_strictly_exported_loss_trains(model_type: str) -> None:
    model, eager = make_model(model_type), make_model(model_type, patch=False)
    program = torch.export.export(Loss(model), text_of(model), strict=True)
    inputs = text_of(model, seed=1)
    assert_no_worse_than_eager(trained(program, *inputs), eager, inputs)


@EXPORTS
@pytest.mark.parametrize("recorded", ["without gradients", "with a frozen head"])
def test_what_was_exported_without_a_gradient_says_so_when_it_trains(recorded: str) -> None:
    model = make_model()
    model.lm_head.requires_grad_(recorded != "with a frozen head")
    with torch.set_grad_enabled(recorded != "without gradients"):
        program = torch.export.export(Loss(model), text_of(model), strict=False)
    module: Any = program.module()
    module.requires_grad_()
    loss = module(*text_of(model))
    with pytest.raises(RuntimeError, match=r"recorded without gradients of .*weight"):
        loss.backward()


@EXPORTS
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=[GRAPH, pytest.mark.slow])])
def test_exported_adapters_train(strict: bool) -> None:
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        names = ["q_proj", "gate_proj", "up_proj", "down_proj", *([] if strict else ["lm_head"])]
        config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        models.append(peft.get_peft_model(make_model(patch=False), config))
    model, eager = apply_patch(models[0]), models[1]
    program = torch.export.export(Loss(model), text_of(model), strict=strict)
    inputs = text_of(model, seed=1)
    assert_no_worse_than_eager(trained(program, *inputs), eager, inputs)


@EXPORTS
@pytest.mark.parametrize("return_logits", ["", "1"])
def test_an_exported_model_returns_real_logits(
    return_logits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", return_logits)
    model = make_model("gemma2")
    input_ids, labels = text_of(model)
    arguments = {"input_ids": input_ids, "labels": labels, "use_cache": False}
    ours = torch.export.export(model, (), arguments, strict=False).module()(**arguments)
    assert patch_status(model).fused is (not return_logits)
    truth = model(**arguments)
    torch.testing.assert_close((ours.loss, ours.logits), (truth.loss, truth.logits + 0))


def as_it_is(model: PreTrainedModel, batch: Batch) -> tuple[Any, Any, FakeTensorMode]:
    return apply_patch(model), batch, FakeTensorMode(allow_non_fake_inputs=True)


def converted(model: PreTrainedModel, batch: Batch) -> tuple[Any, Any, FakeTensorMode]:
    mode = FakeTensorMode()
    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            held.update({n: mode.from_tensor(each) for n, each in held.items() if each is not None})
    return apply_patch(model), {n: mode.from_tensor(each) for n, each in batch.items()}, mode


def built(model: PreTrainedModel, batch: Batch) -> tuple[Any, Any, FakeTensorMode]:
    mode = FakeTensorMode()
    with mode:
        fake = type(model)(model.config)
    return apply_patch(fake), {n: mode.from_tensor(each) for n, each in batch.items()}, mode


@pytest.mark.parametrize("make", [as_it_is, converted, built])
@pytest.mark.parametrize("model_type", MODELS)
def test_fake_tensors_give_the_shapes_of_a_step_without_logits(
    model_type: str, make: Callable[..., Any]
) -> None:
    real = make_model(model_type).float()
    truth = run(real, batch_of(real))
    model, batch, mode = make(make_model(model_type, patch=False).float(), batch_of(real))
    with mode, Made() as made:
        outputs = model(**batch)
        outputs.loss.backward()
    assert patch_status(model).fused
    assert not made.logits
    ours = {"loss": outputs.loss, **{n: p.grad for n, p in model.named_parameters()}}
    for name, each in ours.items():
        expected = truth.get(name)
        if expected is None:  # ``built`` has the layers that ``make_model`` leaves out
            assert ".layers.1." in name
            continue
        assert type(each) is FakeTensor
        assert (each.shape, each.dtype, each.device) == (
            expected.shape,
            expected.dtype,
            expected.device,
        )


def test_logits_of_fake_tensors_are_computed_where_they_are_read() -> None:
    model = make_model("gemma2")
    with FakeTensorMode(allow_non_fake_inputs=True), Made() as made:
        outputs = model(**batch_of(model))
        assert is_deferred(outputs.logits)
        assert not made.logits
        logits = outputs.logits + 0
        assert made.logits
    for each in (logits, outputs.logits[:, :-1] + 0):  # the second without the mode
        assert type(each) is FakeTensor
        assert (each.shape[-1], each.dtype) == (131, torch.float64)


def test_fake_tensors_outside_of_their_mode_give_an_ordinary_loss() -> None:
    model = make_model()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = {name: mode.from_tensor(value) for name, value in batch_of(model).items()}
    with pytest.warns(UserWarning, match="liger_patch computes ordinary logits"):
        loss = model(**batch).loss
    assert type(loss) is FakeTensor
    assert "FakeTensor" in str(patch_status(model).reason)


def test_a_quantized_head_gives_an_ordinary_loss_of_fake_tensors() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model: Any = make_model(patch=False).float()
    weight = model.lm_head.weight.detach()
    head = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=weight.dtype)
    head.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, blocksize=32)
    model.lm_head = head.to("cpu")
    apply_patch(model)
    warned = pytest.warns(UserWarning, match="liger_patch computes ordinary logits")
    with FakeTensorMode(allow_non_fake_inputs=True), warned:
        loss = model(**batch_of(model)).loss
    assert type(loss) is FakeTensor


@pytest.mark.usefixtures("no_rows")
@pytest.mark.filterwarnings("ignore:liger_patch has no test of")
def test_an_untested_model_is_fused_once_a_step_was_compared() -> None:
    model = apply_patch(make_untested())
    batch = batch_of(model)

    def call() -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return model(**batch)

    with pytest.warns(UserWarning, match="before a training step has been compared"):
        assert type(call().logits) is FakeTensor
    model(**batch).loss.backward()
    assert is_deferred(call().logits)


def test_adapters_on_the_head_are_in_the_recorded_operator() -> None:
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        models.append(peft.get_peft_model(make_model(patch=False), config))
    model, eager = apply_patch(models[0]), models[1]
    inputs = text_of(model)
    graph = recorded(training_step(model), "symbolic", *inputs)
    assert patch_status(model).fused
    assert_fused(graph)
    assert_no_worse_than_eager(named(graph(*inputs), model), eager, inputs)
