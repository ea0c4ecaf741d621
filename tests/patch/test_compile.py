"""torch.compile of a patched model: eager's loss and gradients, whatever is compiled, and how.
make_fx, torch.export and FakeTensorMode see the model's own head and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import MARKS, Graphs
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import ROWS, Batch, tiny_batch, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from training_step import Step, assert_right, assert_same_step, joined, step, tell_apart
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.deferred.tensor import DeferredLogits

pytestmark = MARKS
IGNORED = (0.0, 0.3, 0.9, 1.0)  # shares of the labels


def make_model(model_type: str = "llama", *, patch: bool = True) -> PreTrainedModel:
    """A model in float64 with one layer, for the sake of the compiler's time."""
    model = tiny_model(ROWS[model_type]).double()
    del model.model.layers[1:]
    return apply_patch(model) if patch else model


def batch_of(model: nn.Module, seed: int = 0, ignored: float = 0.3) -> Batch:
    batch = tiny_batch(model, seed=seed, ignored=ignored)
    if ignored == 1.0:
        batch["labels"].fill_(-100)
    return batch


def is_deferred(logits: Tensor) -> bool:
    """Whether logits have no values yet."""
    return isinstance(logits, DeferredLogits) and not logits.is_computed


def run(model: nn.Module, batch: Batch, call: Callable[..., Any] | None = None) -> Step:
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
        assert is_deferred(compiled(**batch).logits)
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
def test_calls_of_each_kind_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is read at every compiled call, and labels are looked for."""
    model, uncompiled = make_model(), make_model()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    counts = []
    for seed in range(3):
        batch = batch_of(model, seed)
        for flag, deferred in (("", True), ("1", False), ("0", True)):
            monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", flag)
            assert is_deferred(compiled(**batch).logits) is deferred
            assert patch_status(model).fused is deferred
            assert_same_step(run(model, batch, compiled), run(uncompiled, batch))
        batch.pop("labels")
        outputs, expected = compiled(**batch), uncompiled(**batch)
        assert outputs.loss is None
        assert not is_deferred(outputs.logits)
        torch.testing.assert_close(outputs.logits, expected.logits)
        counts.append(len(graphs.linears))
    assert len(set(counts)) == 1, "compiled again for a kind of call that was compiled before"


@pytest.mark.parametrize(
    ("part", "patch_first"),
    slow_but([("model", True)], [("", True), ("model", True), ("", False)]),
)
def test_a_model_that_is_compiled_in_place_trains_as_uncompiled(
    part: str, patch_first: bool
) -> None:
    """Or its backbone."""
    model = make_model(patch=patch_first)
    graphs = Graphs()
    model.get_submodule(part).compile(backend=graphs)
    apply_patch(model)
    for seed in range(2):
        batch = batch_of(model, seed)
        assert_same_step(run(model, batch), run(make_model(), batch))
    assert patch_status(model).fused
    layers = sum(type(module) is nn.Linear for module in model.modules())
    assert [count for count in graphs.linears if count] == [layers - 1]


def test_a_torch_without_the_private_function_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("liger_patch.kernels.graphs.SET_CALLBACK", None)
    model, graphs = make_model(), Graphs()
    apply_patch(model)
    model.compile(backend=graphs)
    batch = batch_of(model, 0)
    assert_same_step(run(model, batch), run(make_model(), batch))
    assert patch_status(model).fused
    assert graphs.linears == []


def test_a_compiled_model_is_to_be_patched_before() -> None:
    with pytest.raises(TypeError, match="OptimizedModule: give the model within"):
        apply_patch(torch.compile(make_model(patch=False), backend=Graphs()))


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


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    file = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_ddp_of_a_compiled_model_holds_no_logits(option: str) -> None:
    model, uncompiled = make_model(), make_model()
    call = DistributedDataParallel(torch.compile(model, backend="eager"), **{option: True})
    for seed in range(3):
        batch = batch_of(model, seed)
        model.zero_grad()
        outputs = call(**batch)
        outputs.loss.backward()
        ours = {n: p.grad for n, p in model.named_parameters()}
        assert is_deferred(outputs.logits)
        assert_same_step({"loss": outputs.loss.detach(), **ours}, run(uncompiled, batch))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["t5", "m2m_100", "recurrent_gemma", "qwen2_audio"])
def test_models_whose_loss_dynamo_does_not_ask_for_break_the_graph(model_type: str) -> None:
    models = [tiny_model(model_type).float().eval() for _ in range(2)]
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and name.endswith(("block", "layers")):
                del module[1:]  # each takes the compiler seconds
        apply_patch(model)
    batch = {**tiny_batch(models[0]), "use_cache": False}
    ours = run(models[0], batch, torch.compile(models[0], backend="eager"))
    truth = run(models[1], batch)
    assert patch_status(models[0]).fused is patch_status(models[1]).fused
    assert_same_step(ours, truth)


@pytest.mark.slow
def test_inductor_trains_as_uncompiled() -> None:
    model, uncompiled = make_model("gemma2").float(), make_model("gemma2").float()
    batch = batch_of(model)
    ours = run(model, batch, torch.compile(model))
    assert patch_status(model).fused
    truth = step(make_model("gemma2", patch=False), batch)
    assert_right(ours, run(uncompiled, batch), truth)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's first one is
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_trains_as_eager_on_gpus(mode: str) -> None:
    device = torch.device("cuda")
    model, eager = (make_model("gemma2", patch=p).to(device, torch.bfloat16) for p in (True, False))
    batch = {name: value.to(device) for name, value in batch_of(model).items()}
    truth = step(make_model("gemma2", patch=False).to(device), batch)
    compiled = torch.compile(model, mode=mode)
    for _ in range(3):  # CUDA graphs are recorded in the second call
        ours = run(model, batch, compiled)
    assert patch_status(model).fused
    assert_no_worse(ours, run(eager, batch), truth, torch.bfloat16)
    assert is_deferred(compiled(**batch).logits)  # last: a CUDA graph's next call writes over ours


def test_one_graph_of_a_patched_model_is_an_error() -> None:
    model = make_model()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(**batch_of(model))


REASON = "runs the forward pass without values"
WARNS = pytest.mark.filterwarnings("ignore:liger_patch computes ordinary logits")
EXPORTS = pytest.mark.filterwarnings(
    "ignore:.*get_attr",  # torch 2.6
    "ignore:While compiling, we found certain side effects",  # the status of a strict export
)


def assert_not_fused(model: nn.Module) -> None:
    status = patch_status(model)
    assert status.fused is False
    assert REASON in str(status.reason)


class Outputs(nn.Module):
    """What is exported: a patched model's loss and logits."""

    def __init__(self, *, layers: bool) -> None:
        super().__init__()
        self.model = apply_patch(make_model("gemma2", patch=False), layers=layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(input_ids, labels=labels, use_cache=False)
        return outputs.loss, outputs.logits


@WARNS
@EXPORTS
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_has_the_ordinary_loss_and_logits(strict: bool) -> None:
    if strict and not hasattr(torch.compiler, "_is_exporting_flag"):
        pytest.skip("torch 2.6 does not say that it exports")
    model = Outputs(layers=not strict)  # a strict export has the model's own layers
    tokens = torch.export.Dim("tokens", min=4, max=64)
    ids = torch.randint(3, 90, (2, 12))
    shapes = ({1: tokens}, {1: tokens})
    program: Any = torch.export.export(model, (ids, ids), dynamic_shapes=shapes, strict=strict)
    if not strict:  # a strict export runs none of the code that it traces
        assert_not_fused(model.model)
    for length in (5, 31):
        ids = torch.randint(3, 90, (2, length))
        loss, logits = program.module()(ids, ids)
        expected_loss, expected = model(ids, ids)
        torch.testing.assert_close(loss, expected_loss.to(loss.dtype))
        torch.testing.assert_close(logits, expected + 0.0)


def test_fake_tensors_have_the_shapes_of_the_ordinary_step() -> None:
    model = make_model()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.warns(UserWarning, match=REASON) as caught:
        outputs = [model(**batch_of(model)) for _ in range(2)]
    assert len(caught) == 1
    for each in outputs:
        assert type(each.loss) is type(each.logits) is FakeTensor
        assert each.logits.shape[-1] == model.config.vocab_size
    assert_not_fused(model)


def test_options_that_change_the_loss_are_an_error_there() -> None:
    model = apply_patch(make_model(patch=False), z_loss=1e-4)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="z_loss"):
        model(**batch_of(model))
