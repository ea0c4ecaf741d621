"""apply_patch, revert_patch and patch_status: options, errors, and what they say of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import Float64, call, gradients, patched, step, widened

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.kernels import reference
from liger_patch.kernels.options import LossOptions

# what is made of a model, and what is said of it
NO_MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "module": (lambda _: nn.Linear(2, 2), r"transformers.PreTrainedModel .* got Linear"),
    "wrapper": (nn.DataParallel, "DataParallel: give the model within"),
    "name": (lambda _: "organisation/name", "got 'organisation/name': load it first"),
    "trainer": (lambda model: SimpleNamespace(model=model), r"Namespace: give its \.model"),
}


@pytest.mark.parametrize("function", [apply_patch, revert_patch, patch_status])
@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_model_is_a_type_error_that_says_what_to_give(
    function: Any, name: str, model: Any
) -> None:
    make, said = NO_MODELS[name]
    with pytest.raises(TypeError, match=said):
        function(make(model))


@pytest.mark.parametrize("already_patched", [False, True])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("label_smoothing", -0.1),
        ("label_smoothing", 1.1),
        ("label_smoothing", float("nan")),
        ("label_smoothing", None),
        ("z_loss", -1.0),
        ("z_loss", float("inf")),
        ("z_loss", True),
        ("chunk_mib", 0),
        ("chunk_mib", "5"),
        ("reduction", "none"),
        ("strict", "no"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(
    model: Any, option: str, value: Any, already_patched: bool
) -> None:
    if already_patched:
        apply_patch(model)
    before, status = type(model), patch_status(model)
    with pytest.raises(ValueError, match=rf"{option} must be .*got {value!r}"):
        apply_patch(model, **{option: value})
    assert type(model) is before
    assert patch_status(model) == status


OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 1e-2},
    {"reduction": "sum"},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "sum"},
    {"chunk_mib": 0.001},
]


def reference_step(model: Any, batch: dict, options: dict[str, Any]) -> dict[str, Tensor | None]:
    """Loss and gradients of a float64 model by the specification."""
    outputs = call(model, batch)
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    with Float64():
        loss = reference.cross_entropy(
            outputs.logits.flatten(0, 1),
            labels,
            reduction=options.get("reduction", "mean"),
            options=LossOptions(
                label_smoothing=options.get("label_smoothing", 0.0),
                z_loss=options.get("z_loss", 0.0),
            ),
        )
    return {"loss": loss.detach(), **gradients(model, loss)}


@pytest.mark.parametrize("return_logits", ["0", "1"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_options_are_those_of_the_reference_fused_and_not(
    monkeypatch: pytest.MonkeyPatch, model_type: str, options: dict[str, Any], return_logits: str
) -> None:
    model = widened(tiny_model(model_type))
    batch = tiny_batch(model)
    truth = reference_step(model, batch, options)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", return_logits)
    with patched(model, **options):
        ours = step(model, batch)
        assert patch_status(model).fused is (return_logits == "0")
    assert_no_worse(ours, truth, truth, torch.float32)
    plain = step(model, batch)["loss"]
    assert torch.allclose(plain, truth["loss"]) is (options == {"chunk_mib": 0.001})


def test_num_items_in_batch_comes_before_the_reduction(model: Any) -> None:
    model = widened(model)
    batch = {**tiny_batch(model), "num_items_in_batch": 5}
    truth = step(model, batch)
    with patched(model, reduction="sum"):
        ours = step(model, batch)
    assert_no_worse(ours, truth, truth, torch.float32)


def test_patching_twice_is_patching_once_with_the_new_options(model: Any) -> None:
    batch = tiny_batch(model)
    once = apply_patch(tiny_model(), z_loss=0.1)
    assert apply_patch(model, label_smoothing=0.3) is model
    call(model, batch)
    its_class = type(model)
    assert apply_patch(model, z_loss=0.1) is model
    assert type(model) is its_class
    assert torch.equal(call(model, batch).loss, call(once, batch).loss)
    revert_patch(model)
    assert not patch_status(model).patched
    assert type(model) is type(revert_patch(once))


def test_reverting_what_is_not_patched_changes_nothing(model: Any) -> None:
    before, its_class = dict(vars(model)), type(model)
    assert revert_patch(model) is model
    assert type(model) is its_class
    assert vars(model) == before


def test_a_model_that_got_another_class_since_is_not_reverted(model: Any) -> None:
    apply_patch(model)
    sharded = type("FSDPLlamaForCausalLM", (type(model),), {})
    model.__class__ = sharded
    batch = tiny_batch(model)
    call(model, batch)
    assert patch_status(model).fused
    with pytest.raises(RuntimeError, match="FSDPLlamaForCausalLM was given another class"):
        revert_patch(model)
    assert type(model) is sharded


def status_table(model: Any) -> dict[str, str]:
    """The rows of the printed table; the values start in one column."""
    lines = str(patch_status(model)).splitlines()
    width = max(len(name) for name, _ in patch_status(model).rows)
    assert all(line[width : width + 2] == "  " and line[width + 2] != " " for line in lines)
    return {line[:width].rstrip(): line[width + 2 :] for line in lines}


def test_the_status_of_a_model_that_is_not_patched(model: Any) -> None:
    status = patch_status(model)
    assert (status.patched, status.fused, status.reason) == (False, None, None)
    assert status_table(model) == {"model": "LlamaForCausalLM (llama)", "patched": "no"}


def test_the_status_in_a_notebook_is_a_table(model: Any) -> None:
    status = replace(patch_status(model), rows=(("head", "<Linear> & more"), ("patched", "no")))
    first, second = "<td>head</td><td>&lt;Linear&gt; &amp; more</td>", "<td>patched</td><td>no</td>"
    assert status._repr_html_() == f"<table><tr>{first}</tr><tr>{second}</tr></table>"


def test_the_status_names_another_forward(model: Any) -> None:
    """As ``use_liger_kernel=True`` gives one; not one that wraps the patched one."""
    apply_patch(model)
    model.forward = functools.wraps(model.forward)(lambda *args: None)
    assert patch_status(model).reason is None
    model.forward = functools.partial(model.forward)
    assert patch_status(model).reason is None
    model.forward = lambda *args, **options: None
    reason = f"the model has got another forward, of {__name__}, which may not call the patched one"
    assert patch_status(model).reason == reason
    assert status_table(model)["last loss"] == f"no call with labels yet: {reason}"


def test_a_forward_of_liger_kernel_is_warned_of(model: Any) -> None:
    def lce_forward(self: Any, **inputs: Any) -> None: ...

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    apply_patch(model)
    with pytest.warns(UserWarning, match="leaves the loss to Liger-Kernel: .*use_liger_kernel"):
        model.forward = MethodType(lce_forward, model)
    assert status_table(model)["last loss"].startswith("leaves the loss to Liger-Kernel: ")
    assert patch_status(model).fused is False


def test_the_status_before_and_after_a_fused_loss(model: Any) -> None:
    apply_patch(model, label_smoothing=0.1, z_loss=1e-4, reduction="sum", chunk_mib=64)
    before = status_table(model)
    assert before["patched"] == "yes"
    assert before["last loss"] == "no call with labels yet"
    assert before["head"] == "torch.nn.modules.linear.Linear (131, 32) torch.float32 cpu"
    assert before["label smoothing"] == "0.1"
    assert before["z-loss"] == "0.0001"
    assert before["reduction"] == "sum, or sum / num_items_in_batch where the call has that"
    assert "longest row" not in before
    assert before["logits held"] == "64 MiB a chunk"
    assert before["LIGER_PATCH_RETURN_LOGITS"] == "unset"
    assert patch_status(model).fused is None
    call(model, tiny_batch(model))
    assert status_table(model) == before | {"last loss": "fused"}
    assert patch_status(model).fused is True


def test_the_status_after_a_fallback_gives_the_reason(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_patch(model)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    monkeypatch.setenv("LIGER_PATCH_CHUNK_MIB", "7.5")
    call(model, tiny_batch(model))
    status, rows = patch_status(model), status_table(model)
    assert (status.fused, status.reason) == (False, "LIGER_PATCH_RETURN_LOGITS=1")
    assert rows["last loss"] == "ordinary logits: LIGER_PATCH_RETURN_LOGITS=1"
    assert rows["LIGER_PATCH_RETURN_LOGITS"] == "1"
    assert rows["logits held"] == "7.5 MiB a chunk"


def test_the_status_of_a_head_whose_weight_is_a_method(model: Any) -> None:
    class Quantized(nn.Linear):
        def weight(self) -> Tensor:  # pyright: ignore
            return torch.zeros(3, 4)

    apply_patch(model)
    head = model.lm_head
    del head.weight
    head.__class__ = Quantized
    assert "Quantized" in str(patch_status(model))
