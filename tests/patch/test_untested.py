"""Architectures without a row: patched, compared with their own loss, and fused or left alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from exactness import assert_no_worse
from slow_cases import pairwise
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import assert_same_step, call, router_arguments, step
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from untested_classes import LLAMA, NOTICE, LooksAtTypes, Tomorrow, make_model

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.registry import Architecture

pytestmark = pytest.mark.usefixtures("no_rows")

# The second name is what the reason of a loss that is not fused says.
PICKED = [
    (Architecture("gpt2", "GPT2LMHeadModel", ""), None),
    (Architecture("gpt_oss", "GptOssForCausalLM", ""), None),
    (Architecture("idefics3", "Idefics3ForConditionalGeneration", ""), None),
    (Architecture("t5gemma", "T5GemmaForConditionalGeneration", ""), None),
    (Architecture("bart", "BartForCausalLM", ""), None),  # labels are not shifted
    (Architecture("bart", "BartForConditionalGeneration", ""), "Linear) were read by add"),
]


def with_loss(name: str, loss_of: Callable[[Any, Any, Tensor], Any]) -> Any:
    """Return a class whose loss this is of the model, the logits and the labels."""
    return type(name, (Tomorrow,), {"loss_of": loss_of})


def refuse_types(model: Any, logits: Any, labels: Tensor) -> Any:
    if type(logits) is not Tensor:
        raise TypeError("plain tensors only")
    return Tomorrow.loss_of(model, logits, labels)


cross_entropy = nn.functional.cross_entropy
Unshifted = with_loss("Unshifted", lambda _, x, y: cross_entropy(x.flatten(0, 1), y.flatten()))
WithZLoss = with_loss(
    "WithZLoss", lambda m, x, y: Tomorrow.loss_of(m, x, y) + 0.1 * x.logsumexp(-1).square().mean()
)
NotCausal = with_loss(
    "NotCausal", lambda _, x, y: nn.functional.mse_loss(x.tanh(), torch.zeros_like(x))
)
LossOfStates = with_loss("LossOfStates", lambda m, *_: m.lm_head.weight.square().mean())
RefusesTypes = with_loss("RefusesTypes", refuse_types)
# casts its logits to bf16, and caps them there
Narrow = with_loss(
    "Narrow", lambda m, x, y: Unshifted.loss_of(m, 5.0 * torch.tanh(x.bfloat16() / 5.0), y)
)
# has class weights in its own dtype, which cross_entropy takes beside no wider logits
WeighsClasses = with_loss(
    "WeighsClasses",
    lambda m, x, y: cross_entropy(
        x.flatten(0, 1), y.flatten(), torch.ones(x.shape[-1], dtype=m.dtype)
    ),
)


class NoHeadCall(Unshifted):
    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = nn.functional.linear(states, self.lm_head.weight)
        return CausalLMOutputWithPast(loss=self.loss_of(logits, labels), logits=logits)


class ByMatmul(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T


class NoLinearHead(Unshifted):
    def get_output_embeddings(self) -> Any:
        self.lm_head.__class__ = ByMatmul
        return self.lm_head


class OtherHead(Tomorrow):
    def get_output_embeddings(self) -> Any:
        return self.model.layers[0].mlp.up_proj


def training_step(model: Any, batch: Any, **arguments: Any) -> tuple[dict[str, Any], list[str]]:
    """Loss and gradients, and what was warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results = step(model, batch, **arguments)
    return results, [str(each.message) for each in warned if "liger_patch" in str(each.message)]


def assert_eagers(model: Any, batch: Any, eager: Any, reason: str | None, **arguments: Any) -> None:
    """Two steps of a patched model are the eager one's; the first says what was found."""
    ours, said = training_step(model, batch, **arguments)
    again, nothing = training_step(model, batch, **arguments)
    assert len(said) == 1
    assert nothing == []
    status = patch_status(model)
    if reason is None:
        assert NOTICE.split(" .* ")[1] in said[0]
        assert (status.fused, status.architecture) == (True, "verified")
    else:
        assert reason in said[0]
        assert reason in str(status.reason)
        found = "differs" if "its own loss is" in reason else "not fusable"
        assert (status.fused, status.architecture) == (False, found)
    for results in (ours, again):
        assert_same_step(results, eager)


@pytest.mark.parametrize(("row", "reason"), PICKED, ids=lambda x: getattr(x, "class_name", ""))
def test_a_picked_class_is_verified_and_fused_or_left_alone(
    row: Architecture, reason: str | None
) -> None:
    model = tiny_model(row).double()
    batch, arguments = tiny_batch(model), router_arguments(model)
    eager = step(model, batch, **arguments)
    assert_eagers(apply_patch(model), batch, eager, reason, **arguments)
    revert_patch(model)
    assert type(model).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Tomorrow, None),
        (Unshifted, None),
        (WithZLoss, None),
        (
            NotCausal,
            "a loss of its own: the logits of the head (torch.nn.modules.linear.Linear) were read",
        ),
        (NoHeadCall, "a loss of its own: the head (torch.nn.modules.linear.Linear) was not called"),
        (NoLinearHead, "ByMatmul) returns no product that can be recorded"),
        (
            LossOfStates,
            "the logits of the head (torch.nn.modules.linear.Linear) have no part in it",
        ),
        (OtherHead, "were read by mul before the loss"),
        (LooksAtTypes, "its own loss is"),
        (RefusesTypes, "with deferred logits, it raises TypeError: plain tensors only"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_class_of_ones_own_is_verified_and_fused_or_left_alone(
    cls: Any, reason: str | None, dtype: torch.dtype
) -> None:
    model = make_model(cls).to(dtype)
    batch = tiny_batch(model)
    truth = step(make_model(cls).double(), batch)
    eager = step(model, batch)
    if dtype == torch.float64:
        assert_eagers(apply_patch(model), batch, truth, reason)
        return
    ours, said = training_step(apply_patch(model), batch)
    assert len(said) == 1 + (cls is OtherHead)  # its head takes no wider dtype
    assert patch_status(model).fused == (reason is None)
    losses = [{"loss": results["loss"]} for results in (ours, eager, truth)]
    assert_no_worse(*losses, dtype, eps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_a_loss_off_by_little_is_found_in_any_dtype(dtype: torch.dtype, scale: float) -> None:
    """Also where all losses are near the logarithm of the vocabulary: at the start of training."""

    class Shifts(Tomorrow):
        def loss_of(self, logits: Any, labels: Tensor) -> Any:
            moved = labels if type(logits) is Tensor else labels.roll(1, -1)
            return super().loss_of(logits, moved)

    found = []
    for cls in (Tomorrow, Shifts):
        model = make_model(cls).to(dtype)
        model.lm_head.weight.data *= scale
        _, said = training_step(apply_patch(model), tiny_batch(model, length=40))
        found.append((len(said), patch_status(model).fused))
    assert found == [(1, True), (1, False)]


@pytest.mark.parametrize(
    ("scale", "dtype", "cls"),
    pairwise(
        [0.05, 1.0, 100.0],
        [torch.float32, torch.bfloat16, torch.float16],
        [Unshifted, Narrow, WeighsClasses],
    ),
)
def test_an_own_loss_of_16_bits_may_be_less_exact_than_the_fused_one(
    cls: Any, dtype: torch.dtype, scale: float
) -> None:
    """Its labels are learnt: rounded to 16 bits, their losses are 0."""
    model = make_model(cls).to(dtype)
    model.lm_head.weight.data *= scale
    batch = tiny_batch(model, length=9)
    with torch.no_grad():
        batch["labels"] = model(batch["input_ids"]).logits.argmax(-1)
    _, said = training_step(apply_patch(model, layers=False), batch)
    assert len(said) == 1
    assert patch_status(model).fused
    is_compared = cls is not WeighsClasses
    assert ("with logits in a wider dtype: RuntimeError" in said[0]) is not is_compared
    assert (NOTICE.split(" .* ")[1] in said[0]) is is_compared


class Packed(Tomorrow):
    def forward(self, input_ids: Any, labels: Any = None, position_ids: Any = None) -> Any:
        return super().forward(input_ids, labels)


class Preshifted(Packed):
    """Its labels are shifted by the data set."""

    loss_of = Unshifted.loss_of


def packed_batch(model: Any) -> dict[str, Tensor]:
    """Two sequences in one row."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    return {"input_ids": tiny_batch(model, batch=1)["input_ids"], "position_ids": positions}


def test_labels_are_masked_at_boundaries_only_where_they_are_shifted() -> None:
    """An unshifted label is not predicted across one."""
    for cls in (Packed, Preshifted):
        eager = make_model(cls).double()
        batch = packed_batch(eager)
        batch["labels"] = batch["input_ids"].clone()
        expected = dict(batch, labels=batch["labels"].clone())
        if cls is Packed:
            expected["labels"][0, 4] = -100
        truth = call(eager, expected).loss
        model = apply_patch(make_model(cls).double())
        with pytest.warns(UserWarning, match=NOTICE):
            torch.testing.assert_close(call(model, batch).loss, truth)


class OtherInit(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.number = 1


class Wrapped(Preshifted):
    forward = functools.wraps(transformers.LlamaForCausalLM.forward)(
        lambda self, **arguments: Preshifted.forward(self, **arguments)
    )


class Decorated(Preshifted):
    """As Transformers' own modeling code, and code that is copied from it."""

    @can_return_tuple
    def forward(self, input_ids: Any, labels: Any = None, position_ids: Any = None) -> Any:
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("cls", [Preshifted, Wrapped, Decorated])
def test_a_tested_class_with_another_forward_is_compared_and_keeps_its_labels(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In packed rows too: nothing says that its labels are not shifted yet."""
    monkeypatch.setattr(registry, "ARCHITECTURES", (LLAMA,))
    model = make_model(cls).double()
    batch = packed_batch(model)
    batch["labels"] = batch["input_ids"].roll(-1, 1)
    eager = step(model, batch)
    with pytest.raises(ValueError, match=rf"{cls.__name__} .* whose forward is not that of"):
        apply_patch(model, strict=True)
    assert patch_status(model).architecture == "not tested"
    assert_eagers(apply_patch(model), batch, eager, None)
    assert "own loss" in str(patch_status(model))


def test_a_tested_class_with_its_forward_counts_as_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ARCHITECTURES", (LLAMA,))
    model = make_model(OtherInit)
    assert patch_status(model).architecture == "tested"
    apply_patch(model, strict=True)
    call(model, tiny_batch(model))
    again = type(model)(model.config)  # of the patched class
    assert patch_status(apply_patch(again, strict=True)).architecture == "tested"


def test_a_model_without_a_head_is_left_alone_with_the_reason() -> None:
    config = tiny_model().config
    config.pad_token_id = 0
    model = transformers.LlamaForSequenceClassification(config).double()
    batch = tiny_batch(model) | {"labels": torch.tensor([0, 1])}
    batch["position_ids"] = torch.arange(9)[None]
    eager = step(model, batch)
    ours, said = training_step(apply_patch(model), batch)
    assert len(said) == 1
    assert "get_output_embeddings() returns None" in said[0]
    assert_same_step(ours, eager)


def test_the_way_out_and_the_demand_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    model = apply_patch(make_model(LooksAtTypes))
    batch = tiny_batch(model)
    assert call(model, batch).loss == call(make_model(LooksAtTypes), batch).loss
    assert patch_status(model).architecture == "not tested"
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="demands the fused loss, but its own loss is"):
            call(model, batch)


def test_an_error_says_which_layers_have_a_kernel() -> None:
    for name, said in (("gated", "silu or gelu"), ("delta_net", "needs Transformers 5.15")):
        with pytest.raises(ValueError, match=f"has no {name} layer that has a kernel.*{said}"):
            apply_patch(tiny_model(Architecture("gpt2", "GPT2LMHeadModel", "")), layers=[name])
