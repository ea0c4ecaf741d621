"""Long rows under gradient checkpointing, and nowhere else where gradients are wanted: feed-forward
layers run in slices, and projections keep the input of the norm before them, which they compute
again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint
from training_step import assert_right, call, step, widened, with_checkpoints

from liger_patch import apply_patch
from liger_patch.kernels import chunk_sizes, gated_mlp, rms_norm
from liger_patch.layers import checks, long_rows, lora
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload

pytestmark = pytest.mark.skipif(
    checks.TOP_HOOKS is None, reason="torch 2.6 does not tell its hooks"
)
# Llama 4 adds in place to what its shared expert returns
FAMILIES = ["llama", "gemma2", "gemma3_text", "qwen3", "phi3", "glm4", "llama4_text"]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, record: Callable[..., list[int]]) -> list[int]:
    """How many slices each run of a sliced layer had, forward; every row is a long one."""
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 0)
    monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", 0)
    monkeypatch.setattr(
        chunk_sizes, "SLICE_BYTES", 5 * 4 * 64 * 7
    )  # 7 tokens of 64 float32 features
    return record(gated_mlp, "_result_of_slices", lambda x, layer, slices, *_: len(slices))


CASES: list[tuple[str, dict[str, Any]]] = [
    *itertools.product(FAMILIES, [{}, {"reentrant": True}]),
    *itertools.product(["llama", "gemma2"], [{"dtype": torch.bfloat16}]),
    ("llama", {"autocast": True}),
    ("llama", {"autocast": True, "dtype": torch.bfloat16}),
    *(("llama", {"frozen": name}) for name in ("gate_proj", "down_proj", "mlp", "layers.0")),
]


@pytest.mark.parametrize(("model_type", "how"), CASES, ids=str)
def test_models_train_as_eager(model_type: str, how: dict[str, Any], runs: list[int]) -> None:
    dtype, autocast = how.get("dtype", torch.float32), "autocast" in how
    eager = tiny_model(model_type, dtype=dtype)
    for name, parameter in eager.named_parameters():
        parameter.requires_grad_(how.get("frozen", "nothing") not in name)
    wide, batch = widened(eager), tiny_batch(eager, length=33)
    with_checkpoints(eager, "reentrant" in how)
    model = apply_patch(copy.deepcopy(eager))
    found, expected = (step(each, batch, autocast=autocast) for each in (model, eager))
    assert found["loss"].dtype == expected["loss"].dtype
    low = torch.bfloat16 if autocast else dtype
    assert_right(found, expected, step(wide, batch), low)
    assert all(slices > 1 for slices in runs)
    again = "reentrant" in how or model_type.startswith(("gemma", "glm4"))  # a norm behind keeps y
    assert len(runs) == (4 if again else 2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["float32", "autocast", "dropout"])
def test_adapters_train_as_at_once(way: str, reentrant: bool, runs: list[int]) -> None:
    lora_models = pytest.importorskip("lora_models", reason="peft is not installed")
    autocast, dropout = way == "autocast", 0.5 if way == "dropout" else 0.0
    dtype = torch.bfloat16 if autocast else torch.float32
    eager = lora_models.adapted(dtype=dtype, lora_dropout=dropout)
    batch = tiny_batch(eager.get_base_model())
    wide, at_once = copy.deepcopy(eager).double(), apply_patch(copy.deepcopy(eager))
    model = apply_patch(copy.deepcopy(eager))
    for each in (eager, model):
        with_checkpoints(each, reentrant)
    ours, expected, plain = (
        lora_models.training_step(each, batch, autocast=autocast)
        for each in (model, at_once, eager)
    )
    if dropout:  # whose masks are tensors here
        assert not runs
        assert_same_bits(ours, expected)
        return
    assert len(runs) == (4 if reentrant else 2)
    assert_right(ours, plain, lora_models.training_step(wide, batch), dtype)


def test_offloaded_checkpoints(runs: list[int]) -> None:
    """The bits of those on the device."""
    found = []
    for offload in (None, CheckpointOffload(("cpu",), min_bytes=1)):
        runs.clear()
        model = with_checkpoints(tiny_model(), False)
        apply_patch(model, checkpoint_offload=True)
        record: Any = record_of(model)
        record.offload = offload
        found.append(step(model, tiny_batch(model)))
        assert len(runs) == 2
    assert_same_bits(*found)


def test_evaluation_of_long_rows(runs: list[int]) -> None:
    model = tiny_model().eval()
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


@pytest.mark.parametrize(
    "kind", ["no checkpoints", "selective checkpoints", "save_on_cpu", "short rows"]
)
def test_what_runs_at_once(kind: str, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What other hooks of saved tensors hold is not computed again."""
    model = apply_patch(tiny_model().train())
    batch, size = tiny_batch(model), model.config.intermediate_size
    if kind == "selective checkpoints":
        selective(model)
    if kind == "short rows":
        with_checkpoints(model, False)
        monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 5 * 4 * size * batch["input_ids"].numel())
    with save_on_cpu() if kind == "save_on_cpu" else nullcontext():
        model(**batch).loss.backward()
    assert not runs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_runs_at_once(runs: list[int]) -> None:
    model = apply_patch(tiny_model()).double()
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
@pytest.mark.parametrize("kind", ["slices", "at once", "adapters"])
def test_a_thread_that_compiles_changes_nothing(
    kind: str, when: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer is when it is computed again must be what it was."""
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 2**40 if kind == "at once" else 0)
    if kind == "adapters":
        lora_models = pytest.importorskip("lora_models", reason="peft is not installed")
        inner = apply_patch(lora_models.adapted()).get_base_model().model
    else:
        inner = apply_patch(tiny_model()).model
    layer, x = inner.layers[0], torch.randn(2, 9, inner.config.hidden_size, requires_grad=True)
    tables = inner.rotary_emb(x, torch.arange(9)[None])

    def function(x: Tensor) -> Tensor:
        if kind == "adapters":
            return layer(x, position_embeddings=tables)
        return layer.mlp(layer.input_layernorm(x))

    part = layer if kind == "adapters" else layer.mlp
    wanted = [x, *(each for each in part.parameters() if each.requires_grad)]
    results = []
    for others in ("", when):
        runs.clear()
        with compiled_elsewhere() if others == "forward" else nullcontext():
            y = checkpoint.checkpoint(function, x, use_reentrant=False)
        with compiled_elsewhere() if others == "backward" else nullcontext():
            results.append(torch.autograd.grad(y.square().sum(), wanted))
        assert len(runs) == (kind != "at once")
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_an_exported_layer_takes_rows_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """No length is compared with that of a long row."""
    layer = apply_patch(tiny_model()).double().model.layers[0]
    size, hidden_size = layer.mlp.gate_proj.weight.shape
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 5 * 8 * size * 20)
    monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", 8 * hidden_size * 20)
    norm_and_mlp = nn.Sequential(layer.input_layernorm, layer.mlp)
    short, long = (torch.randn(1, n, hidden_size).double() for n in (9, 99))
    lengths = ({1: torch.export.Dim("length")},)
    with torch.no_grad():
        exported = torch.export.export(norm_and_mlp, (short,), dynamic_shapes=lengths, strict=False)
        torch.testing.assert_close(exported.module()(long), norm_and_mlp(long))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_projections_of_a_norm_keep_its_input(
    model_type: str,
    reentrant: bool,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., list[Any]],
) -> None:
    """And give the bits of those that keep the norm."""
    lora_models = pytest.importorskip("lora_models", reason="peft is not installed")
    results, norms = [], record(rms_norm.NormInputs, "norm")
    noted = record(lora, "run_lora_linears", lambda *args: args[3] is not None)
    for least in (2**40, 0):
        monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", least)
        noted.clear()
        norms.clear()
        model = apply_patch(lora_models.adapted(model_type, dtype=torch.bfloat16))
        with_checkpoints(model, reentrant)
        batch = tiny_batch(model.get_base_model())
        results.append(lora_models.training_step(model, batch, autocast=True))
        # queries, keys and values of two layers, once more in the backward pass
        expected = (2 if reentrant else 4, 2) if least == 0 else (0, 0)
        assert (sum(noted), len(norms)) == expected
    assert_same_bits(*results)


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "nothing": lambda x, y: None,
    "the input": lambda x, y: x.add_(1),
    "the norm": lambda x, y: y.add_(1),
}


@pytest.mark.parametrize(
    ("which", "shape"), [*((each, (3, 8)) for each in CHANGES), ("nothing", (1, 3, 2, 8))], ids=str
)
def test_norms_that_have_changed_or_are_of_queries_are_kept(
    which: str, shape: tuple[int, ...]
) -> None:
    """The first are no longer what their source says; no projection is behind the others."""
    weight, found = torch.linspace(1.0, 2.0, 8), []

    def layer(x: Tensor) -> Tensor:
        x = x * 2.0
        y = rms_norm.run_rms_norm(x, weight, 1e-6, 0.0, x.dtype)
        long_rows.note_source(y, x, weight, 1e-6, 0.0, x.dtype)
        with torch.no_grad():
            CHANGES[which](x, y)
        found.append((long_rows.source_of(y), y.detach()))
        return y.sum()

    checkpoint.checkpoint(layer, torch.randn(shape, requires_grad=True), use_reentrant=False)
    ((source, y),) = found
    assert (source is None) == (which != "nothing" or len(shape) == 4)
    if source is not None:
        assert torch.equal(source.norm(), y)
