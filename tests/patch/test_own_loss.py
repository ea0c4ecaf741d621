"""Losses that a model computes itself, without Transformers' loss function, or several of one head:
multi-token prediction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import assert_same_step, call, patched, step, widened
from transformers import LlamaForCausalLM
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast
from untested_classes import NOTICE, Tomorrow, make_model

from liger_patch import apply_patch, patch_status


class OwnLoss(Tomorrow):
    """Computes its loss itself, as some models of Transformers do."""

    smoothing, reduction, beside_a_mean = 0.0, "mean", False

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        shifted = logits.float()[..., :-1, :].contiguous().view(-1, V)
        targets = labels[..., 1:].reshape(-1)
        how: Any = {"label_smoothing": self.smoothing, "reduction": self.reduction}
        loss = nn.CrossEntropyLoss(**how)(shifted, targets).mean()
        if self.beside_a_mean:
            loss = loss + nn.functional.cross_entropy(shifted, targets)
        return loss


@pytest.fixture
def own_loss() -> Any:
    return widened(make_model(OwnLoss))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_loss_that_the_model_computes_itself_is_fused(own_loss: Any, smoothing: float) -> None:
    batch = tiny_batch(own_loss)
    own_loss.smoothing = smoothing
    truth = step(own_loss, batch)
    with patched(own_loss):
        with pytest.warns(UserWarning, match=NOTICE):
            ours = step(own_loss, batch)
        assert patch_status(own_loss).fused
        assert not call(own_loss, batch).logits.is_computed
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.filterwarnings(f"ignore:{NOTICE}:UserWarning")
def test_a_mean_of_no_label_is_eagers_nan_in_evaluation_alone(own_loss: Any) -> None:
    batch = tiny_batch(own_loss)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with patched(own_loss):
        assert call(own_loss, batch).loss == 0.0
        with torch.no_grad():
            assert call(own_loss, batch).loss.isnan()


def test_the_options_of_the_patch_reach_a_loss_that_the_model_computes_itself(
    own_loss: Any,
) -> None:
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "sum"}
    batch = tiny_batch(own_loss)
    model = widened(tiny_model())
    with patched(model, **options):
        truth = step(model, batch)
    with patched(own_loss, **options):
        with pytest.warns(UserWarning, match=NOTICE):
            ours = step(own_loss, batch)
        assert patch_status(own_loss).fused
        own_loss.smoothing = 0.1
        torch.testing.assert_close(step(own_loss, batch), ours)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.filterwarnings("ignore:liger_patch has no test of:UserWarning")
@pytest.mark.parametrize(
    ("options", "of_its_own"),
    [
        ({"label_smoothing": 0.3}, {"smoothing": 0.1}),
        ({"reduction": "sum"}, {"reduction": "none"}),
        ({"reduction": "sum"}, {"reduction": "sum"}),
        ({"reduction": "sum"}, {"reduction": "none", "beside_a_mean": True}),
        ({"label_smoothing": 0.3}, {"smoothing": 0.1, "beside_a_mean": True}),
        ({"label_smoothing": 0.3, "z_loss": 0.1}, {"smoothing": 0.1}),  # z_loss would be reached
    ],
)
def test_an_option_that_the_models_own_loss_has_otherwise_is_an_error(
    own_loss: Any, options: dict[str, Any], of_its_own: dict[str, Any]
) -> None:
    (name, *_) = options
    vars(own_loss).update(of_its_own)
    said = f"^{name}=[^,]* cannot reach the loss that OwnLoss computes"
    with patched(own_loss, **options), pytest.raises(ValueError, match=said):
        call(own_loss, tiny_batch(own_loss))


def test_the_options_of_the_patch_without_the_fused_loss_are_an_error_there(
    own_loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    batch = tiny_batch(own_loss)
    expected = call(own_loss, batch).loss
    with patched(own_loss):
        assert torch.equal(call(own_loss, batch).loss, expected)
        assert patch_status(own_loss).reason == "LIGER_PATCH_RETURN_LOGITS=1"
    with patched(own_loss, z_loss=0.1), pytest.raises(ValueError, match=r"z_loss=0\.1"):
        call(own_loss, batch)


def test_a_loss_outside_the_model_is_said_in_its_backward_pass() -> None:
    model = apply_patch(tiny_model(), layers=False)
    batch = tiny_batch(model)
    assert call(model, batch).loss.isfinite()
    assert patch_status(model).fused
    logits = model(input_ids=batch["input_ids"]).logits
    assert patch_status(model).fused  # until they are used
    with pytest.warns(UserWarning, match="called without labels.*apply_patch.label_smoothing"):
        logits.mean().backward()
    assert patch_status(model).fused is False
    model(input_ids=batch["input_ids"]).logits.mean().backward()  # is said once
    with torch.no_grad():
        assert not model(input_ids=batch["input_ids"]).logits.requires_grad


def test_a_loss_outside_the_model_is_an_error_where_a_fused_one_is_demanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    model = apply_patch(tiny_model(), layers=False)
    logits = model(input_ids=tiny_batch(model)["input_ids"]).logits
    with pytest.raises(RuntimeError, match="demands the fused loss, but the model was called"):
        logits.mean().backward()


def focal(source: Tensor, target: Tensor, *_: Any, **options: Any) -> Tensor:
    log_p = source.log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return -(((1 - log_p.exp()) ** 2) * log_p)[target != -100].mean()


@pytest.mark.parametrize(
    ("holder", "name"),
    [(loss_utils, "fixed_cross_entropy"), (nn.functional, "cross_entropy")],
    ids=["of Transformers", "of torch"],
)
def test_a_replaced_loss_is_the_users(
    holder: Any, name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tiny_batch(model)
    ordinary = call(model, batch).loss
    monkeypatch.setattr(holder, name, focal)
    truth = step(model, batch)
    assert truth["loss"] != ordinary
    with patched(model, layers=False), pytest.warns(UserWarning, match=f"{name} was replaced"):
        ours = step(model, batch)
    assert_same_bits(ours, truth)


class MultiToken(LlamaForCausalLM):
    """Predicts the next three tokens one after another, as DeepSeek V3 does: each of the states of
    the last and of the embedding of the token that they predict.
    """

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, V)
            for depth in (1, 2):
                states = (states + self.model.embed_tokens(shifted(input_ids, depth, 0))).tanh()
                targets = shifted(labels, depth + 1, -100)
                further = self.loss_function(self.lm_head(states), labels, V, shift_labels=targets)
                loss = loss + 0.3 * further
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def shifted(ids: Tensor, by: int, value: int) -> Tensor:
    return nn.functional.pad(ids, (0, by), value=value)[..., by:].contiguous()


@pytest.mark.parametrize("tied", [False, True])
def test_losses_of_one_head_sum_into_its_gradient(tied: bool, reads: list[Any]) -> None:
    config = tiny_model().config
    config.tie_word_embeddings = tied
    model = MultiToken(config).double().train()
    batch = tiny_batch(model)
    eager = step(model, batch)
    with pytest.warns(UserWarning, match=NOTICE):
        step(apply_patch(model), batch)
    reads.clear()  # of the comparison
    ours = step(model, batch)
    status = patch_status(model)
    assert (status.fused, status.reason, reads) == (True, None, [])
    assert_same_step(ours, eager)
