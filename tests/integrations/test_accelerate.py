"""accelerate: prepared, unwrapped, dispatched and offloaded models stay patched, and train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor
from training_step import assert_fused, assert_right, call, step, widened
from transformers import PreTrainedModel

from liger_patch import apply_patch, revert_patch
from liger_patch.deferred.tensor import DeferredLogits

accelerate = pytest.importorskip("accelerate")

from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

CPU = torch.device("cpu")
WHEN = ("before", "after")


@pytest.fixture(autouse=True)
def no_accelerator_state() -> Iterator[None]:
    """accelerate keeps one precision for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def patched_around(
    change: Callable[[PreTrainedModel], Any], when: str, model_type: str = "llama", **options: Any
) -> PreTrainedModel:
    """A model that is patched before or after `change`, or not ("")."""
    model = tiny_model(model_type)
    if when == "before":
        apply_patch(model, **options)
    change(model)
    if when == "after":
        apply_patch(model, **options)
    return model


def accelerator_of(mixed_precision: str = "bf16") -> accelerate.Accelerator:
    return accelerate.Accelerator(mixed_precision=mixed_precision, cpu=True)


def assert_deferred(model: PreTrainedModel, logits: Tensor) -> None:
    assert_fused(model)
    assert isinstance(logits, DeferredLogits)
    assert not logits.is_computed


def assert_trains_as_eager(
    place: Callable[[PreTrainedModel], Any],
    when: str,
    batch: Any,
    model_type: str = "llama",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> PreTrainedModel:
    """Return the patched model, of which the parameters' gradients are where they are."""
    plain, results = tiny_model(model_type), {}
    truth = step(widened(plain), tiny_batch(plain))
    for patch in ("", when):
        model = patched_around(place, patch, model_type, **options)
        results[patch] = step(model, batch)
    assert_fused(model)
    for name, parameter in model.named_parameters():
        assert results[when][name].device == parameter.device, name
    truth, eager, ours = (
        {name: value.cpu() for name, value in result.items()}
        for result in (truth, results[""], results[when])
    )
    assert_right(ours, eager, truth, dtype)
    return model


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_prepared_model_trains_as_eager(mixed_precision: str, model_type: str, when: str) -> None:
    batch = tiny_batch(tiny_model(model_type))
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
    prepare: Any = accelerator_of(mixed_precision).prepare
    model = assert_trains_as_eager(prepare, when, batch, model_type, dtype)
    outputs = call(model, batch)
    assert outputs.loss.dtype == outputs.logits.dtype == torch.float32
    assert_deferred(model, outputs.logits)


@pytest.mark.parametrize("when", WHEN)
def test_what_accelerate_gathers_of_the_logits_is_eagers(when: str) -> None:
    gathered, accelerator = {}, accelerator_of()
    for patch in ("", when):
        model = patched_around(accelerator.prepare, patch, "gemma2", layers=False)
        batch = tiny_batch(model)
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        gathered[patch] = [
            accelerator.gather_for_metrics(outputs.logits),
            *accelerator.gather_for_metrics((outputs.logits, batch["labels"])),
            accelerator.gather(outputs.logits),
            accelerator.pad_across_processes(outputs.logits, dim=1),
            accelerator.reduce(outputs.logits),
            accelerator.gather_for_metrics({"logits": outputs.logits.argmax(-1)})["logits"],
        ]
    for ours, eager in zip(gathered[when], gathered[""], strict=True):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("keep_fp32_wrapper", [True, False])
@pytest.mark.parametrize("when", WHEN)
def test_an_unwrapped_model_stays_patched(when: str, keep_fp32_wrapper: bool) -> None:
    accelerator = accelerator_of()
    model = patched_around(accelerator.prepare, when)
    batch = tiny_batch(model)
    before, unprepared = model(**batch).loss, apply_patch(tiny_model())(**batch).loss
    assert before != unprepared
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=keep_fp32_wrapper) is model
    outputs = model(**batch)
    assert_deferred(model, outputs.logits)
    # a forward that accelerate had replaced before the patch stays replaced
    stays_bf16 = keep_fp32_wrapper or when == "after"
    assert torch.equal(outputs.loss, before if stays_bf16 else unprepared)
    assert isinstance(model(**batch, return_dict=False)[1], Tensor)


def hook_every_module(model: PreTrainedModel) -> None:
    add_hook_to_module(model, AlignDevicesHook(CPU, io_same_device=True))
    for name, module in model.named_modules():
        if name and not list(module.children()):
            add_hook_to_module(module, AlignDevicesHook(CPU))


@pytest.mark.parametrize("when", WHEN)
def test_hooks_come_and_go(when: str) -> None:
    eager_class = type(tiny_model())
    model = patched_around(hook_every_module, when)
    batch = tiny_batch(model)
    expected = apply_patch(tiny_model())(**batch).loss
    for change in (revert_patch, apply_patch):
        change(model)
        assert isinstance(model(**batch).logits, DeferredLogits) is (change is apply_patch)
    remove_hook_from_module(model, recurse=True)
    for change in (revert_patch, apply_patch):
        change(model)
        outputs = model(**batch)
        assert isinstance(outputs.logits, DeferredLogits) is (change is apply_patch)
    assert torch.equal(outputs.loss, expected)
    assert type(revert_patch(model)) is eager_class


def dispatch(devices: dict[str, str], **how: Any) -> Callable[[PreTrainedModel, Path], Any]:
    return lambda model, folder: accelerate.dispatch_model(
        model, devices, main_device="cpu", offload_dir=str(folder), **how
    )


PLACES: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "all": dispatch({"": "cpu"}, force_hooks=True),
    "parts": dispatch({"model": "cpu", "lm_head": "cpu"}, force_hooks=True),
    "head on disk": dispatch({"model": "cpu", "lm_head": "disk"}),
    "head offloaded": lambda m, _: accelerate.cpu_offload(m.lm_head, execution_device=CPU),
    "all offloaded": lambda m, _: accelerate.cpu_offload(m, execution_device=CPU),
    "all on disk": lambda m, folder: accelerate.disk_offload(m, str(folder), execution_device=CPU),
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    ("place", "model_type"),
    [*((place, "llama") for place in PLACES), ("all", "gemma2"), ("all offloaded", "gemma2")],
)
def test_a_dispatched_model_is_fused_and_trains_as_eager(
    place: str, model_type: str, when: str, tmp_path: Path
) -> None:
    batch: Batch = tiny_batch(tiny_model(model_type))
    results = {}
    for patch in ("", when):
        model = patched_around(lambda m: PLACES[place](m, tmp_path), patch, model_type)
        outputs = model(**batch)
        if outputs.loss.requires_grad:
            outputs.loss.backward()
        # offloaded weights have none: their parameters are on the meta device
        parameters = [(n, p) for n, p in model.named_parameters() if p.device.type != "meta"]
        results[patch] = {"loss": outputs.loss.detach(), **{n: p.grad for n, p in parameters}}
        if not patch:
            eager_logits = outputs.logits
    assert_deferred(model, outputs.logits)
    assert torch.equal(outputs.logits, eager_logits)
    truth = step(widened(tiny_model(model_type)), batch)
    # a weight that is offloaded has no gradient, patched or not
    truth = {name: None if value is None else truth[name] for name, value in results[""].items()}
    assert_no_worse(results[when], results[""], truth, torch.float32)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = [  # of the decoder, and of the head
    ("cuda:0", "cpu"),
    ("cpu", "cuda:0"),
    pytest.param("cuda:0", "cuda:1", marks=two_gpus),
    pytest.param("cuda:1", "cuda:0", marks=two_gpus),
    pytest.param("cuda:1", "cuda:1", marks=two_gpus),  # which is not the current device
]


@pytest.mark.gpu
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("body", "head"), DEVICES)
def test_a_head_on_a_device_of_its_own_is_fused_and_trains_as_eager(
    body: str, head: str, when: str
) -> None:
    def place(model: PreTrainedModel) -> None:
        model.model.to(body)
        model.lm_head.to(head)
        # as dispatch_model does, which runs a part that is on the CPU on the first GPU
        add_hook_to_module(model, AlignDevicesHook(body, io_same_device=True))
        add_hook_to_module(model.lm_head, AlignDevicesHook(head))

    batch = {name: value.to(body) for name, value in tiny_batch(tiny_model()).items()}
    # with its own logits, bit for bit
    model = assert_trains_as_eager(place, when, batch, layers=False)
    outputs = model(**batch)
    assert_deferred(model, outputs.logits)
    assert outputs.loss.device == outputs.logits.device == torch.device(body)
    assert torch.equal(outputs.logits, revert_patch(model)(**batch).logits)


@pytest.mark.gpu
@two_gpus
def test_a_model_that_device_map_spreads_is_fused_and_trains_as_eager() -> None:
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    devices |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    place: Any = lambda model: accelerate.dispatch_model(model, devices)  # noqa: E731
    assert_trains_as_eager(place, "after", tiny_batch(tiny_model()))
