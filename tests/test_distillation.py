"""Distillation of patched models is that of eager ones, whose logits are held."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import gradients

from liger_patch import apply_patch as patch_layers_too
from liger_patch import deferred_logits, distillation, distillation_loss, patch_status
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels import reference

OPTIONS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "jsd": {"divergence": "jsd", "beta": 0.3, "temperature": 2.0, "ce_weight": 0.4},
    "sum": {"divergence": "reverse_kl", "reduction": "sum"},
    "items": {"num_items_in_batch": 5, "ce_weight": 0.4},
}
STUDENTS = ("llama", "gemma2", "granite")  # plain; tied with a softcap; with a scale


def apply_patch(*models: Any) -> list[Any]:
    """With the models' own layers: kernels of layers have float32 inside."""
    return [patch_layers_too(model, layers=False) for model in models]


@pytest.fixture(autouse=True)
def no_reason_was_said() -> Iterator[None]:
    distillation._warn_once.cache_clear()
    yield
    distillation._warn_once.cache_clear()


def given(
    student: str = "llama", dtype: torch.dtype = torch.float64, *, patch: bool = False
) -> tuple[Any, Any, dict[str, Tensor], Tensor]:
    """Return student and teacher, a batch, and its labels."""
    models = tiny_model(student, dtype=dtype), tiny_model("qwen3", dtype=dtype, seed=1)
    batch = tiny_batch(models[0])
    labels = batch.pop("labels")
    return *(apply_patch(*models) if patch else models), batch, labels


def fused(student: Any, teacher: Any, batch: dict[str, Tensor], labels: Any, **how: Any) -> Tensor:
    with deferred_logits():
        outputs = student(**batch)
        with torch.no_grad():
            others = teacher(**batch)
    return distillation_loss(outputs, others, labels, **how)


def eager(student: Any, teacher: Any, batch: dict[str, Tensor], labels: Any, **how: Any) -> Tensor:
    logits = student(**batch).logits[:, :-1].flatten(0, 1)
    with torch.no_grad():
        others = teacher(**batch).logits[:, :-1].flatten(0, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return reference.distillation(logits.to(wide), others.to(wide), labels[:, 1:].flatten(), **how)


def results(model: Any, loss: Tensor) -> dict[str, Tensor | None]:
    return {"loss": loss.detach(), **gradients(model, loss)}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("model_type", STUDENTS)
def test_every_gradient_is_eagers(model_type: str, options: dict, reads: list[Any]) -> None:
    student, teacher, batch, labels = given(model_type)
    expected = results(student, eager(student, teacher, batch, labels, **options))
    apply_patch(student, teacher)
    found = results(student, fused(student, teacher, batch, labels, **options))
    torch.testing.assert_close(found, expected)
    assert not reads
    assert all(value.grad is None for value in teacher.parameters())
    assert patch_status(student).fused


def test_frozen_head_and_calls_with_labels(reads: list[Any]) -> None:
    student, teacher, batch, labels = given()
    student.get_output_embeddings().requires_grad_(False)
    expected = results(student, eager(student, teacher, batch, labels))
    outputs, others = (each(**batch, labels=labels) for each in apply_patch(student, teacher))
    found = results(student, distillation_loss(outputs, others, labels))
    torch.testing.assert_close(found, expected)
    assert not reads


def test_without_labels_every_token_counts() -> None:
    student, teacher, batch, _ = given(patch=True)
    logits, others = (model(**batch).logits.flatten(0, 1) for model in (student, teacher))
    expected = reference.distillation(logits, others)
    torch.testing.assert_close(fused(student, teacher, batch, None), expected)


def test_weights_are_those_of_the_labels() -> None:
    student, teacher, batch, labels = given()
    weight = torch.rand(labels.shape, dtype=torch.float64)
    expected = eager(student, teacher, batch, labels, token_weight=weight[:, 1:].flatten())
    apply_patch(student, teacher)
    found = fused(student, teacher, batch, labels, token_weight=weight)
    torch.testing.assert_close(found, expected)
    with pytest.warns(UserWarning, match="they are real logits"):
        real = distillation_loss(
            student(**batch).logits, teacher(**batch), labels, token_weight=weight
        )
    torch.testing.assert_close(real, expected)


@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_own_model_without_its_adapters_is_the_teacher(
    model_type: str, target: str, reads: list[Any]
) -> None:
    peft = pytest.importorskip("peft")
    base, _, batch, labels = given(model_type)

    def student() -> Any:
        config = peft.LoraConfig(r=3, target_modules=[target], init_lora_weights=False)
        torch.manual_seed(0)
        return peft.get_peft_model(copy.deepcopy(base), config)

    def loss(model: Any, patched: bool) -> Tensor:
        with deferred_logits() if patched else nullcontext():
            outputs = model(**batch)
            with torch.no_grad(), model.disable_adapter():
                others = model(**batch)
        if patched:
            return distillation_loss(outputs, others, labels)
        rows = [each.logits[:, :-1].flatten(0, 1) for each in (outputs, others)]
        return reference.distillation(*rows, labels[:, 1:].flatten())

    plain, ours = student(), student()
    expected = results(plain, loss(plain, False))
    assert expected["loss"] > 1e-6
    apply_patch(ours)
    torch.testing.assert_close(results(ours, loss(ours, True)), expected)
    assert not reads


def test_bf16_under_autocast(reads: list[Any]) -> None:
    student, teacher, batch, labels = given(dtype=torch.float32)

    def under_autocast(loss: Any, enabled: bool = True) -> dict[str, Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = loss(student, teacher, batch, labels)
        return results(student, value)

    expected = under_autocast(eager)
    truth = under_autocast(eager, enabled=False)
    apply_patch(student, teacher)
    found = under_autocast(fused)
    assert not reads
    exact = {name: None if value is None else value.double() for name, value in truth.items()}
    assert_no_worse(found, expected, exact, torch.bfloat16)


@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_teacher_outside_of_autocast(teacher_dtype: torch.dtype, reads: list[Any]) -> None:
    """In the dtype of autocast it is fused; another one, autocast would round."""
    student, teacher, batch, labels = given(dtype=torch.float32)
    teacher = teacher.to(teacher_dtype)
    apply_patch(student, teacher)
    with deferred_logits():
        with torch.autocast("cpu", torch.bfloat16):
            outputs = student(**batch)
        others = teacher(**batch)
    is_fused = teacher_dtype == torch.bfloat16
    with nullcontext() if is_fused else pytest.warns(UserWarning, match="load the teacher in"):
        found = distillation_loss(outputs, others, labels)
    assert bool(reads) != is_fused
    rows = [each.logits[:, :-1].flatten(0, 1).float() for each in (outputs, others)]
    expected = reference.distillation(*rows, labels[:, 1:].flatten())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_teacher_in_inference_mode() -> None:
    student, teacher, batch, labels = given(patch=True)
    with deferred_logits():
        outputs = student(**batch)
        with torch.inference_mode():
            others = teacher(**batch)
    expected = fused(student, teacher, batch, labels)
    loss = distillation_loss(outputs, others, labels)
    loss.backward()
    assert torch.equal(loss, expected)


def test_no_supervised_token_gives_zero() -> None:
    student, teacher, batch, labels = given(patch=True)
    found = results(student, fused(student, teacher, batch, torch.full_like(labels, -100)))
    assert not any(value is not None and value.any() for value in found.values())


def test_outside_the_context_logits_are_real_and_the_reason_is_said_once() -> None:
    student, teacher, batch, labels = given()
    expected = results(student, eager(student, teacher, batch, labels, ce_weight=0.3))
    apply_patch(student)
    said = "from real logits: of the teacher's logits, they are real"
    with pytest.warns(UserWarning, match=said):
        loss = fused(student, teacher, batch, labels, ce_weight=0.3)
    torch.testing.assert_close(results(student, loss), expected)
    fused(student, teacher, batch, labels)  # without a warning: pytest makes an error of it
    assert not isinstance(student(**batch).logits, DeferredLogits)


def test_reason_is_that_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher, batch, labels = given()
    expected = eager(student, teacher, batch, labels)
    apply_patch(student, teacher)
    student.get_output_embeddings().register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="of the student's logits, backward hooks of the head"):
        torch.testing.assert_close(fused(student, teacher, batch, labels), expected)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    with pytest.raises(RuntimeError, match="demands the fused loss, but of the student's logits"):
        fused(student, teacher, batch, labels)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    distillation._warn_once.cache_clear()
    torch.testing.assert_close(fused(student, teacher, batch, labels), expected)  # says nothing


def test_logits_that_were_read_are_used_as_they_are() -> None:
    student, teacher, batch, labels = given(patch=True)
    expected = fused(student, teacher, batch, labels)
    with deferred_logits():
        outputs, others = student(**batch), teacher(**batch)
    assert isinstance(outputs.logits, DeferredLogits)
    assert outputs.logits.sum().isfinite()
    with pytest.warns(UserWarning, match="of the student's logits, they were read"):
        found = distillation_loss(outputs, others, labels)
    torch.testing.assert_close(found, expected)


def test_class_that_is_not_tested_is_compared_first() -> None:
    student, teacher, batch, labels = given(dtype=torch.float32)

    class Own(type(student)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    student.__class__ = Own
    apply_patch(student, teacher)
    with pytest.warns(UserWarning, match="is not tested: call it with labels once"):
        real = fused(student, teacher, batch, labels)
    with pytest.warns(UserWarning, match="liger_patch"):
        student(**batch, labels=labels)
    torch.testing.assert_close(fused(student, teacher, batch, labels), real)  # says nothing


def test_distributed_vocabulary_is_an_error() -> None:
    logits: Any = torch.ones(2, 3, 9)
    logits.device_mesh = "of a DTensor, or of deferred logits in its place"
    with pytest.raises(ValueError, match="student_outputs must have whole logits, got a vocab"):
        distillation_loss(logits, torch.ones(2, 3, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student_outputs": 3}, r"student_outputs must have logits of shape \(B, T, V\), got int"),
        (
            {"teacher_outputs": torch.ones(2, 3)},
            r"teacher_outputs must have logits .* got \(2, 3\)",
        ),
        (
            {"teacher_outputs": torch.ones(2, 3, 9)},
            r"tokens \(2, 9\) of student_outputs, got \(2, 3\)",
        ),
        ({"labels": torch.ones(2, 8).long()}, r"labels must have shape \(2, 9\), got \(2, 8\)"),
        ({"token_weight": torch.ones(9)}, r"token_weight must have shape \(2, 9\), got \(9,\)"),
        ({"token_weight": "x"}, "token_weight must be a tensor, got 'x'"),
        ({"ignore_index": None}, "ignore_index must be an integer, got None"),
        ({"divergence": "jsd", "beta": 2.0}, r"beta must be in \[0, 1\], got 2.0"),
        ({"beta": 0.3}, "beta must be None, or divergence \"jsd\", got 0.3 for 'forward_kl'"),
        ({"divergence": "kl"}, "divergence must be one of .* got 'kl'"),
        ({"reduction": "none"}, "reduction must be .* got 'none'"),
        ({"ce_weight": 1.0, "labels": None}, "ce_weight=1.0 needs labels, got None"),
    ],
    ids=str,
)
def test_errors_name_argument_value_and_what_was_expected(change: dict, message: str) -> None:
    student, teacher, batch, labels = given(patch=True)
    for context in (deferred_logits(), nullcontext()):  # before real logits are computed, too
        with context:
            outputs = {"student_outputs": student(**batch), "teacher_outputs": teacher(**batch)}
        with pytest.raises(ValueError, match=message):
            distillation_loss(**{**outputs, "labels": labels, **change})
