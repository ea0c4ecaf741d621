"""Every row of the registry: a patched model computes what the eager one computes, in every way to
call it. The rows of all families run ``test_every_architecture.py``.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from exactness import assert_no_worse
from rows import every_row, is_known_well, model_type
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import (
    assert_fused,
    assert_right,
    assert_same_step,
    call,
    patched,
    router_arguments,
    step,
    widened,
)
from transformers import GenerationMixin

from liger_patch import patch_status, registry
from liger_patch.deferred.tensor import DeferredLogits


class Subject:
    """The models of one row, and what they are called with."""

    def __init__(self, row: registry.Architecture) -> None:
        self.row = row
        self.model = tiny_model(row)
        self.wide = widened(self.model)
        self.batch = tiny_batch(self.model)
        self.arguments = router_arguments(self.model)


@pytest.fixture(scope="module", params=every_row(), ids=model_type)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


def assert_deferred(logits: Tensor) -> None:
    assert isinstance(logits, DeferredLogits)
    assert not logits.is_computed


def test_loss_and_gradients_are_no_worse_than_eager(subject: Subject) -> None:
    truth = step(subject.wide, subject.batch, **subject.arguments)
    eager = step(subject.model, subject.batch, **subject.arguments)
    with patched(subject.model):
        ours = step(subject.model, subject.batch, **subject.arguments)
        assert_fused(subject.model)
    assert_right(ours, eager, truth)


def test_loss_and_each_gradient_agree_in_float64(subject: Subject) -> None:
    """Each gradient for itself: no rounding is in the way, so any term that is lost shows. With
    what Trainer gives; labels alone are what test_every_architecture.py runs.
    """
    # not what shifting the labels would give: a forward that ignores it is found out
    shift_labels = subject.batch["labels"].flip(1).contiguous()
    number = torch.tensor(7)
    batch = {**subject.batch, "shift_labels": shift_labels, "num_items_in_batch": number}
    truth = step(subject.wide, batch, **subject.arguments)
    with patched(subject.wide):
        ours = step(subject.wide, batch, **subject.arguments)
        assert_fused(subject.wide)
    assert_same_step(ours, truth)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("use_reentrant", slow_but([False], [True, False]))
def test_gradient_checkpointing_gives_the_same_gradients(
    subject: Subject, use_reentrant: bool
) -> None:
    model = subject.model
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{subject.row.class_name} has no gradient checkpointing")
    is_5_24 = transformers.__version__.startswith("5.24.")
    if use_reentrant and is_5_24 and subject.row.model_type == "mistral_large4":
        pytest.skip("Transformers 5.24 goes back through its indices twice, in eager too")
    truth = step(subject.wide, subject.batch)
    # Transformers 5.23 has renamed both.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": use_reentrant})
    try:
        eager = step(model, subject.batch)
        with patched(model):
            ours = step(model, subject.batch)
            assert_fused(model)
    finally:
        getattr(model, f"{name}_checkpointing_disable")()
    without = {name for name, gradient in eager.items() if gradient is None}
    assert without == {name for name, gradient in ours.items() if gradient is None}
    if without != {name for name, gradient in truth.items() if gradient is None}:
        version = transformers.__version__
        pytest.skip(
            f"Transformers {version} loses gradients by checkpointing {subject.row.class_name}"
        )
    assert_right(ours, eager, truth)


def test_evaluation_computes_a_loss_without_logits(subject: Subject) -> None:
    model = subject.wide.eval()
    try:
        with torch.no_grad():
            truth = call(model, subject.batch, **subject.arguments).loss
            with patched(model):
                outputs = call(model, subject.batch, **subject.arguments)
                assert_fused(model)
                assert_deferred(outputs.logits)
    finally:
        model.train()
    assert not outputs.loss.requires_grad
    assert_no_worse({"loss": outputs.loss}, {"loss": truth}, {"loss": truth}, torch.float32)


def test_a_call_without_labels_is_eagers(subject: Subject) -> None:
    batch = {name: value for name, value in subject.batch.items() if name != "labels"}
    if subject.model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    eager = call(subject.model, batch)
    with patched(subject.model, layers=False):
        outputs = call(subject.model, batch)
        assert patch_status(subject.model).fused is None
    assert outputs.loss is None
    assert type(outputs.logits) is Tensor
    assert torch.equal(outputs.logits, eager.logits)


def test_generate_gives_the_same_tokens(subject: Subject) -> None:
    its_class = type(subject.model)
    is_own = "generate" in vars(its_class) or its_class._sample is not GenerationMixin._sample
    if is_own and not is_known_well(subject.row):
        pytest.skip(f"{subject.row.class_name} has a generate of its own")
    model = subject.model.eval()
    prompt = {"input_ids": subject.batch["input_ids"][:1, :4]}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    try:
        eager = model.generate(**prompt, **options)
        with patched(model):
            ours = model.generate(**prompt, **options)
    finally:
        model.train()
    assert eager.shape[1] == (5 if model.config.is_encoder_decoder else 8)
    assert torch.equal(ours, eager)


def test_all_labels_ignored_gives_zero_loss_and_zero_gradients(subject: Subject) -> None:
    batch = subject.batch | {"labels": torch.full_like(subject.batch["labels"], -100)}
    with patched(subject.model):
        ours = step(subject.model, batch)
        assert_fused(subject.model)
    assert ours.pop("loss").item() == 0.0
    trained = [gradient for gradient in ours.values() if gradient is not None]
    assert trained
    assert all((gradient == 0).all() for gradient in trained)


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize(
    "name", ["cohere", "gemma2", "gemma3", "llama", "mllama_text_model", "qwen2_vl", "qwen3"]
)
def test_bfloat16_is_no_worse_than_eager(name: str, autocast: bool) -> None:
    model = tiny_model(name, dtype=torch.float32 if autocast else torch.bfloat16)
    wide, batch = widened(model), tiny_batch(model)
    truth = step(wide, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        eager = step(model, batch)
        with patched(model):
            ours = step(model, batch)
            assert_fused(model)
    for name, gradient in eager.items():
        assert gradient is None or ours[name].dtype == gradient.dtype, name
    losses = [{"loss": results["loss"]} for results in (ours, eager, truth)]
    assert_no_worse(*losses, torch.bfloat16)
    assert_right(ours, eager, truth, torch.bfloat16)
