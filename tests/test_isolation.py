"""A patch belongs to one model instance: copies have their own, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exactness import assert_no_worse
from gloo_group import run
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import Float64, call, gradients, step, widened
from transformers.loss import loss_utils

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.subclass import derived_class, once_for_each_class

CLASS = transformers.LlamaForCausalLM


def snapshot() -> dict[str, dict[str, Any]]:
    """Every attribute of the class, its bases and the modules that a patch could reach."""
    holders = [
        *CLASS.__mro__[:-1],
        nn.Linear,
        nn.functional,
        torch,
        torch.overrides,
        loss_utils,
        transformers.models.llama.modeling_llama,
        transformers.models.llama.modeling_llama.LlamaModel,
        transformers.modeling_utils,
        transformers.masking_utils,
        transformers.masking_utils.AttentionMaskInterface,
    ]
    contents = {f"{holder!r}": dict(vars(holder)) for holder in holders}
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    contents["masks"] = {name: masks[name] for name in masks}
    contents["LOSS_MAPPING"] = dict(loss_utils.LOSS_MAPPING)
    return contents


def test_no_class_module_or_other_model_changes(model: Any) -> None:
    other = tiny_model(seed=1)
    batch = tiny_batch(model)
    expected = step(other, batch)
    attributes = {name: dict(vars(module)) for name, module in other.named_modules()}
    before, seen = snapshot(), []
    apply_patch(model)
    assert_unchanged(before)
    during = model.model.norm.register_forward_hook(
        lambda *_: seen.append(assert_unchanged(before))
    )
    step(model, batch)
    during.remove()
    assert seen == [None]
    assert_unchanged(before)
    assert type(other) is CLASS
    for name, module in other.named_modules():
        assert vars(module).keys() == attributes[name].keys()
    outputs = call(other, batch)
    assert type(outputs.logits) is Tensor
    for name, value in step(other, batch).items():
        assert torch.equal(value, expected[name]), name
    assert type(tiny_model()) is CLASS
    revert_patch(model)
    assert_unchanged(before)


def assert_unchanged(before: dict[str, dict[str, Any]]) -> None:
    for name, contents in snapshot().items():
        # caches that a call fills anew are not of the patch
        changed = [
            key
            for key in contents.keys() | before[name].keys()
            if contents.get(key) is not before[name].get(key) and not key.startswith("__abc")
        ]
        # bound class methods and properties of modules are the same objects, so any other is news
        assert changed == [], f"{name}: {changed}"


def test_the_patched_class_looks_like_its_own(model: Any) -> None:
    signature = inspect.signature(model.forward)
    described = repr(model)
    apply_patch(model)
    assert isinstance(model, CLASS)
    assert type(model).__name__ == CLASS.__name__
    assert type(model).__qualname__ == CLASS.__qualname__
    assert type(model).__module__ == CLASS.__module__
    assert inspect.signature(model.forward) == signature
    assert inspect.signature(type(model).forward) == inspect.signature(CLASS.forward)
    assert repr(model) == described
    assert model.forward.__doc__ == CLASS.forward.__doc__
    assert type(apply_patch(tiny_model())) is type(model)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("after_a_call", [False, True])
def test_a_copy_is_patched_and_independent(
    model: Any, copied: Callable, after_a_call: bool
) -> None:
    batch = tiny_batch(model)
    expected = call(model, batch).loss
    apply_patch(model, z_loss=0.0, chunk_mib=77)
    if after_a_call:
        call(model, batch).loss.backward()
    again = copied(model)
    assert type(again) is type(model)
    status = patch_status(again)
    assert status.patched
    assert status.fused is (True if after_a_call else None)
    assert dict(status.rows)["logits held"] == "77 MiB a chunk"
    outputs = call(again, batch)
    assert isinstance(outputs.logits, DeferredLogits)
    torch.testing.assert_close(outputs.loss, expected)

    apply_patch(again, chunk_mib=5)
    assert dict(patch_status(model).rows)["logits held"] == "77 MiB a chunk"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(again.parameters(), lr=0.5)
    outputs.loss.backward()
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    torch.testing.assert_close(call(model, batch).loss, expected)
    assert call(again, batch).loss < expected - 0.01

    revert_patch(again)
    assert type(again) is CLASS
    assert patch_status(model).patched
    assert isinstance(call(model, batch).logits, DeferredLogits)
    assert type(call(again, batch).logits) is Tensor


TRAIN_AND_MOVE = """
import sys
import torch
from gloo_group import join, leave
from torch.distributed.fsdp import fully_shard
from tiny_models import ROWS, tiny_batch, tiny_model
from liger_patch import apply_patch, patch_status

join(sys.argv[1], 0, 1)
model = apply_patch(tiny_model(ROWS["llama"]))
if sys.argv[2] == "fully_shard":
    fully_shard(model)
else:  # PyTorch's option moves plain parameters as it moves DTensors
    torch.__future__.set_swap_module_params_on_conversion(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = tiny_batch(model)
for _ in range(2):
    model.cpu()  # moves all parameters, also those that are there
    before = model(**batch).loss
    before.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model(**batch).loss < before
    assert patch_status(model).fused
leave()
"""


@pytest.mark.parametrize("kind", ["plain", "fully_shard"])
def test_a_model_moves_between_steps_of_a_process_group(kind: str, tmp_path: Path) -> None:
    """PyTorch moves no DTensor that has a weak reference."""
    if kind == "fully_shard" and torch.__version__.startswith("2.6"):
        pytest.skip("fully_shard needs an accelerator there")
    (tmp_path / "script.py").write_text(TRAIN_AND_MOVE)
    run(str(tmp_path / "script.py"), str(tmp_path / "group"), kind, processes=1)


IMPORT = """
import sys
from torch.optim import optimizer
assert "liger_patch" not in sys.modules
import liger_patch
assert not optimizer._global_optimizer_post_hooks
assert not any(name.startswith(("liger_patch.cli", "liger_patch.estimate")) for name in sys.modules)
"""


def test_an_import_watches_no_optimizer_and_loads_no_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IMPORT)
    run(str(tmp_path / "script.py"), processes=1)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_checkpoint_is_the_same(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    class_name = type(model).__name__
    model.save_pretrained(tmp_path / "eager")
    apply_patch(model)
    call(model, tiny_batch(model))
    model.save_pretrained(tmp_path / "patched")
    names = sorted(path.name for path in (tmp_path / "eager").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in names:
        contents = [(tmp_path / kind / name).read_bytes() for kind in ("eager", "patched")]
        assert contents[0] == contents[1], name
    config = json.loads((tmp_path / "patched" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    loaded = type(model).from_pretrained(tmp_path / "patched")  # by the patched class
    assert not patch_status(loaded).patched
    batch = tiny_batch(model)
    assert type(call(loaded, batch).logits) is Tensor
    assert not call(apply_patch(loaded), batch).logits.is_computed
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert type(auto) is type(revert_patch(model))
    assert torch.equal(call(auto.train(), batch).loss, call(model, batch).loss)


def replica_of(model: Any) -> Any:
    """What torch.nn.DataParallel gives each device: the instance without its parameters."""
    replica = model._replicate_for_data_parallel()
    children = {module: module._replicate_for_data_parallel() for module in model.modules()}
    children[model] = replica
    for module, copied in children.items():
        copied._modules.update((name, children[child]) for name, child in module.named_children())
        for name, parameter in module._parameters.items():
            setattr(copied, name, None if parameter is None else parameter * 1.0)
    return replica


def test_a_replica_of_data_parallel_trains_unfused_and_says_so() -> None:
    model = widened(tiny_model())
    batch = tiny_batch(model)
    truth = step(model, batch)
    apply_patch(model)
    with pytest.warns(UserWarning, match="DataParallel gathers the logits") as warned, Float64():
        outputs = replica_of(model)(**batch)
    assert len(warned) == 1
    assert type(outputs.logits) is Tensor
    ours = {"loss": outputs.loss.detach(), **gradients(model, outputs.loss)}
    assert_no_worse(ours, truth, truth, torch.float32)
    assert patch_status(model).fused is False
    replica_of(model)(**batch)  # without a warning: pytest makes an error of it
    call(model, batch)
    assert patch_status(model).fused


def test_threads_that_patch_one_class_first_get_one_class() -> None:
    @once_for_each_class
    def derive(original: type) -> type:
        time.sleep(0.05)  # the others come in meanwhile
        return derived_class(original, derive)

    with ThreadPoolExecutor(4) as threads:
        classes = list(threads.map(derive, [nn.Linear] * 4))
    assert len(set(classes)) == 1


def test_two_models_train_in_two_threads() -> None:
    models = [widened(tiny_model()), widened(tiny_model("gemma2"))]
    batches = [tiny_batch(model) for model in models]
    truths = [step(model, batch) for model, batch in zip(models, batches, strict=True)]
    for model in models:
        apply_patch(model)
    start = threading.Barrier(2)

    def last_of_five_steps(model: Any, batch: Any) -> Any:
        start.wait()
        return [step(model, batch) for _ in range(5)][-1]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(last_of_five_steps, models, batches))
    for ours, truth in zip(results, truths, strict=True):
        assert_no_worse(ours, truth, truth, torch.float32)
    assert all(patch_status(model).fused for model in models)


def test_two_models_that_share_a_head_are_patched_apart(model: Any) -> None:
    other = tiny_model(seed=1)
    other.lm_head = model.lm_head
    batch = tiny_batch(model)
    expected = call(other, batch).logits
    apply_patch(model)
    assert not call(model, batch).logits.is_computed
    logits = call(other, batch).logits
    assert type(logits) is Tensor
    assert torch.equal(logits, expected)
