"""Feed-forward layers of long rows in slices, under gradient checkpointing and nowhere else where
gradients are wanted: in whole models, beside eager's.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from training_step import call, joined, step, widened

from liger_patch import apply_patch
from liger_patch.kernels import chunk_sizes, gated_mlp
from liger_patch.layers import checks, long_rows
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.skipif(checks.TOP_HOOKS is None, reason="torch 2.6 does not tell its hooks"),
]
# Llama 4 adds in place to what its shared expert returns
FAMILIES = ["llama", "gemma2", "gemma3_text", "qwen3", "phi3", "glm4", "llama4_text"]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slices each run of a sliced layer had, forward; every row is a long one."""
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 0)
    monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", 0)
    monkeypatch.setattr(
        chunk_sizes, "SLICE_BYTES", 5 * 4 * 64 * 7
    )  # 7 tokens of 64 float32 features
    found: list[int] = []
    result = gated_mlp._result_of_slices

    def counted(x: Tensor, layer: Any, slices: Any, *others: Any) -> Tensor:
        found.append(len(slices))
        return result(x, layer, slices, *others)

    monkeypatch.setattr(gated_mlp, "_result_of_slices", counted)
    return found


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_models_train_as_eager(model_type: str, reentrant: bool, runs: list[int]) -> None:
    wide = widened(tiny_model(ROWS[model_type]))
    eager = checkpointed(tiny_model(ROWS[model_type]), reentrant)
    model, batch = apply_patch(copy.deepcopy(eager)), tiny_batch(eager, length=33)
    truth, plain, ours = joined(step(wide, batch), step(eager, batch), step(model, batch))
    assert_no_worse(ours, plain, truth, torch.float32)
    assert all(slices > 1 for slices in runs)
    again = reentrant or model_type.startswith(("gemma", "glm4"))  # a norm behind keeps y
    assert len(runs) == (4 if again else 2)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_bfloat16_is_no_worse_than_eager(model_type: str, runs: list[int]) -> None:
    wide = widened(tiny_model(ROWS[model_type], dtype=torch.bfloat16))
    eager = checkpointed(tiny_model(ROWS[model_type], dtype=torch.bfloat16))
    model, batch = apply_patch(copy.deepcopy(eager)), tiny_batch(eager, length=33)
    truth, plain, ours = joined(step(wide, batch), step(eager, batch), step(model, batch))
    assert runs
    assert_no_worse(ours, plain, truth, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, runs: list[int]) -> None:
    eager = checkpointed(tiny_model(ROWS["llama"], dtype=dtype))
    wide = widened(tiny_model(ROWS["llama"], dtype=dtype))
    model, batch = apply_patch(copy.deepcopy(eager)), tiny_batch(eager, length=33)
    results = []
    for each in (eager, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(**batch).loss
        loss.backward()
        found = {name: p.grad for name, p in each.named_parameters()}
        results.append({"loss": loss.detach(), **found})
    for name, value in results[0].items():
        assert (value is None) == (results[1][name] is None)
        if value is not None:
            assert value.dtype == results[1][name].dtype, name
    assert runs
    truth, plain, ours = joined(step(wide, batch), *results)
    assert_no_worse(ours, plain, truth, torch.bfloat16)


@pytest.mark.parametrize("frozen", ["gate_proj", "down_proj", "mlp", "layers.0"])
def test_frozen_weights_get_no_gradient(frozen: str, runs: list[int]) -> None:
    eager, wide = tiny_model(ROWS["llama"]), widened(tiny_model(ROWS["llama"]))
    for each in (eager, wide):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(frozen not in name)
    model, batch = apply_patch(checkpointed(copy.deepcopy(eager))), tiny_batch(eager, length=33)
    truth, plain, ours = joined(step(wide, batch), step(eager, batch), step(model, batch))
    assert runs
    assert_no_worse(ours, plain, truth, torch.float32)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["float32", "autocast", "dropout"])
def test_adapters_train_as_at_once(way: str, reentrant: bool, runs: list[int]) -> None:
    lora_models = pytest.importorskip("lora_models", reason="peft is not installed")
    dropout = 0.5 if way == "dropout" else 0.0
    dtype = torch.bfloat16 if way == "autocast" else torch.float32
    eager = lora_models.adapted(dtype=dtype, lora_dropout=dropout)
    batch = tiny_batch(eager.get_base_model())
    wide, at_once = copy.deepcopy(eager).double(), apply_patch(copy.deepcopy(eager))
    model = apply_patch(copy.deepcopy(eager))
    for each in (eager, model):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    how = {"autocast": way == "autocast"}
    ours = lora_models.training_step(model, batch, **how)
    expected = lora_models.training_step(at_once, batch, **how)
    if dropout:  # whose masks are tensors here
        assert not runs
        assert all(torch.equal(ours[name], value) for name, value in expected.items())
        return
    assert len(runs) == (4 if reentrant else 2)
    plain = lora_models.training_step(eager, batch, **how)
    truth, plain, ours = joined(lora_models.training_step(wide, batch), plain, ours)
    assert_no_worse(ours, plain, truth, torch.bfloat16 if how["autocast"] else dtype)


def test_checkpointing_computes_as_much_as_eager() -> None:
    counts = []
    for layers in (False, True):
        model = apply_patch(checkpointed(tiny_model(ROWS["llama"])), layers=layers)
        with FlopCounterMode(display=False) as counted:
            model(**tiny_batch(model)).loss.backward()
        counts.append(counted.get_total_flops())
    eager, ours = counts
    assert 0 < ours <= eager


def test_offloaded_checkpoints(runs: list[int]) -> None:
    """The bits of those on the device."""
    found = []
    for offload in (None, CheckpointOffload(("cpu",), min_bytes=1)):
        runs.clear()
        model = checkpointed(tiny_model(ROWS["llama"]))
        apply_patch(model, checkpoint_offload=True)
        record = record_of(model)
        assert record is not None
        record.offload = offload
        found.append(step(model, tiny_batch(model)))
        assert len(runs) == 2
    plain, offloaded = found
    for name, value in plain.items():
        assert value is None or torch.equal(offloaded[name], value)


def test_evaluation_of_long_rows(runs: list[int]) -> None:
    model = tiny_model(ROWS["llama"]).eval()
    batch = tiny_batch(model)
    with torch.no_grad():
        truth = call(widened(model), batch).loss
        eager = model(**batch).loss
        ours = apply_patch(model)(**batch).loss
    assert_no_worse({"loss": ours}, {"loss": eager}, {"loss": truth}, torch.float32, eps=2)
    assert len(runs) == 2


def selective(model: Any) -> Any:
    policy = checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    contexts = functools.partial(
        checkpoint.create_selective_checkpoint_contexts, lambda *_, **__: policy
    )
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return model


def hooked(model: Any) -> Any:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    return checkpointed(model)


def biased(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.up_proj.bias = nn.Parameter(torch.ones(layer.mlp.up_proj.out_features))
    return checkpointed(model)


AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "no checkpoints": lambda model: model,
    "selective checkpoints": selective,
    "hooks": hooked,
    "a bias": biased,
}


@pytest.mark.parametrize("change", AT_ONCE.values(), ids=AT_ONCE)
def test_what_runs_at_once(change: Callable[[Any], Any], runs: list[int]) -> None:
    model = apply_patch(change(tiny_model(ROWS["llama"]).train()))
    model(**tiny_batch(model)).loss.backward()
    assert not runs


def test_other_hooks_of_saved_tensors_run_at_once(runs: list[int]) -> None:
    """What they hold is not computed again."""
    model = apply_patch(tiny_model(ROWS["llama"]).train())
    with save_on_cpu():
        model(**tiny_batch(model)).loss.backward()
    assert not runs


def test_short_rows_run_at_once(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_patch(checkpointed(tiny_model(ROWS["llama"])))
    batch = tiny_batch(model)
    size = model.config.intermediate_size
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 5 * 4 * size * batch["input_ids"].numel())
    model(**batch).loss.backward()
    assert not runs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_runs_at_once(runs: list[int]) -> None:
    model = apply_patch(tiny_model(ROWS["llama"])).double()
    layer, x = model.model.layers[0].mlp, torch.randn(2, 9, model.config.hidden_size).double()
    with torch.no_grad():
        expected = layer(x)
        assert len(runs) == 1
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
    assert len(runs) == 1


@contextmanager
def compiled_elsewhere() -> Iterator[None]:
    """While another thread compiles a function of its own."""
    begun, may_end = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        begun.set()
        may_end.wait(60)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=function, args=(torch.ones(2),))
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        may_end.set()
        thread.join()


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("slices", [True, False])
def test_a_thread_that_compiles_changes_nothing(
    slices: bool, when: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer is when it is computed again must be what it was."""
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 0 if slices else 2**40)
    layer = apply_patch(tiny_model(ROWS["llama"])).model.layers[0]
    x = torch.randn(2, 9, layer.mlp.gate_proj.in_features, requires_grad=True)
    results = []
    for others in ("", when):
        with compiled_elsewhere() if others == "forward" else nullcontext():
            y = checkpoint.checkpoint(
                lambda x: layer.mlp(layer.input_layernorm(x)), x, use_reentrant=False
            )
        with compiled_elsewhere() if others == "backward" else nullcontext():
            results += torch.autograd.grad(y.sum(), [x, *layer.mlp.parameters()])
        assert len(runs) == (len(results) // 4 if slices else 0)
    pairs = zip(results[:4], results[4:], strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.usefixtures("nothing_is_compiled", "runs")
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_thread_that_compiles_changes_no_adapters(when: str) -> None:
    lora_models = pytest.importorskip("lora_models", reason="peft is not installed")
    inner = apply_patch(lora_models.adapted()).get_base_model().model
    layer, x = inner.layers[0], torch.randn(2, 9, inner.config.hidden_size)
    tables = inner.rotary_emb(x, torch.arange(9)[None])
    adapters = [each for each in layer.parameters() if each.requires_grad]
    results = []
    for others in ("", when):
        with compiled_elsewhere() if others == "forward" else nullcontext():
            y = checkpoint.checkpoint(
                lambda x: layer(x, position_embeddings=tables), x, use_reentrant=False
            )
        with compiled_elsewhere() if others == "backward" else nullcontext():
            results.append(torch.autograd.grad(y.square().sum(), adapters))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_an_exported_layer_takes_rows_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """No length is compared with that of a long row."""
    layer = apply_patch(tiny_model(ROWS["llama"])).double().model.layers[0]
    size, hidden_size = layer.mlp.gate_proj.weight.shape
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 5 * 8 * size * 20)
    monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", 8 * hidden_size * 20)
    norm_and_mlp = nn.Sequential(layer.input_layernorm, layer.mlp)
    short, long = (torch.randn(1, n, hidden_size).double() for n in (9, 99))
    lengths = ({1: torch.export.Dim("length")},)
    with torch.no_grad():
        exported = torch.export.export(norm_and_mlp, (short,), dynamic_shapes=lengths, strict=False)
        torch.testing.assert_close(exported.module()(long), norm_and_mlp(long))
