"""A mask with padding is left out only where no result of the padding is used. Losses and gradients
are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import (
    CONFIGS,
    TOKENS,
    WARNINGS,
    Calls,
    causal_mask,
    configured,
    make_batch,
    make_model,
)
from attention_models import served_calls as served_calls
from tiny_models import tiny_model
from torch import Tensor
from training_step import assert_right, step, widened
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from untested_classes import NOTICE

from liger_patch import apply_patch
from liger_patch.patch.forward import record_of

pytestmark = WARNINGS


def test_padding_of_zeros_gives_finite_gradients(calls: Calls) -> None:
    """Gemma 3n divides by the size of a hidden state, and that of a new padding token is zero."""
    model, batch = tiny_model("gemma3n_text"), make_batch("padded")
    model.config.use_cache = False
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    assert not model.get_input_embeddings().weight[0].any()
    truth, own = step(widened(model), batch), step(model, batch)
    calls.own.clear()
    ours = step(apply_patch(model, layers=["attention"]), batch)
    assert True not in calls.own
    assert_right(ours, own, truth)


@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_logits_of_padding_that_are_read_with_gradients_are_warned_of(
    kind: str, calls: Calls, recwarn: pytest.WarningsRecorder
) -> None:
    model, batch = apply_patch(make_model("mistral"), layers=["attention"]), make_batch(kind)
    with torch.no_grad():  # as in metrics
        logits = model(**batch).logits
    logits.sum()
    assert not recwarn.list
    for _ in range(2):
        outputs = model(**batch)
        (outputs.loss + outputs.logits.logsumexp(-1).mean()).backward()
    assert len(calls.flash) == 6
    found = [str(each.message) for each in recwarn.list]
    expected = "liger_patch outputs.logits of padded tokens are not eager's"
    assert [each.startswith(expected) for each in found] == [True] * (kind == "padded")


@pytest.mark.parametrize("kind", ["padded", "padded left"])
def test_recurrent_layers_see_padding_on_the_left(kind: str, calls: Calls) -> None:
    """Of Qwen3-Next: its linear attention and its convolutions see all tokens before theirs."""
    model = tiny_model("qwen3_next")
    model.config.use_cache = False
    apply_patch(model, layers=["attention"])(**make_batch(kind))
    assert (calls.flash, calls.own) == ([], [kind == "padded left"])


def _labelled(token: int, kept: Callable[[Tensor, int], Tensor], label: int) -> Any:
    def change(model: Any, batch: dict[str, Any]) -> None:
        batch["attention_mask"][1] = kept(torch.arange(TOKENS), token)
        batch["labels"][1, label] = 7

    return change


def _untested(model: Any, batch: dict[str, Any]) -> None:
    record: Any = record_of(model)
    record.tested, record.compared = False, "before"


USES_OF_PADDING: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "a label behind padding": _labelled(29, torch.lt, 30),  # which the last padded token predicts
    "a padded label": _labelled(35, torch.lt, 36),
    "a label behind padding on the left": _labelled(10, torch.ge, 10),
    "no labels": lambda _, batch: batch.pop("labels"),
    "own logits": lambda *_: None,
    "not tested": _untested,
    "a router": configured(output_router_logits=0.1),
    "a router, asked for": lambda _, batch: batch.update(output_router_logits=True),
    "hidden states": lambda _, batch: batch.update(output_hidden_states=True),
    "logits in the loss": configured(z_loss_coefficient=0.1),
    "several devices": lambda model, _: setattr(
        model, "hf_device_map", {"model": "cpu", "lm_head": "meta"}
    ),
    "a mask of the caller's": lambda _, batch: batch.update(
        attention_mask=causal_mask(batch["attention_mask"])
    ),
}


@pytest.mark.filterwarnings("ignore:liger_patch has no test of LlamaForCausalLM")
@pytest.mark.parametrize("kind", USES_OF_PADDING)
def test_padding_whose_results_may_be_used_keeps_its_mask(
    kind: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("padded")
    if kind == "own logits":
        monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    USES_OF_PADDING[kind](model, batch)
    model(**batch)
    assert (calls.flash, calls.own) == ([], [True, True])


def test_a_loss_that_does_not_shift_its_labels_keeps_the_mask(calls: Calls) -> None:
    """Of M2M-100, whose first padded token may have a label."""
    model = tiny_model("m2m_100").eval()
    model.config.use_cache = False
    batch = make_batch("padded")
    given = {
        "input_ids": torch.randint(3, 131, (2, 9)),
        "decoder_input_ids": batch["input_ids"],
        "decoder_attention_mask": batch["attention_mask"],
        "labels": batch["labels"].index_fill(1, torch.tensor([30]), 7),
    }
    model(**given)
    own = calls.own.copy()
    calls.own.clear()
    apply_patch(model, layers=["attention"])(**given)
    assert (calls.flash, calls.own) == ([], own)


class WithPenalty(LlamaForCausalLM):
    """A user's class: its loss has a term of all hidden states, those of padding too."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs: Any) -> Any:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(states)
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss + states.square().mean(), logits=logits)


def test_a_forward_of_the_users_keeps_its_mask(calls: Calls) -> None:
    torch.manual_seed(0)
    model, batch = WithPenalty(CONFIGS["llama"]).train(), make_batch("padded left")
    truth, own = step(widened(model), batch), step(model, batch)
    apply_patch(model, layers=["attention"])
    with pytest.warns(UserWarning, match=NOTICE):
        step(model, batch)
    calls.own.clear()
    ours = step(model, batch)
    assert (calls.flash, calls.own) == ([], [True, True])
    assert_right(ours, own, truth)
