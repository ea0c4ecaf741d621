"""``loss_weights`` in a call of a patched model: the truth is the loss by hand, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packed_samples import (
    IGNORED,
    flattened,
    make_model,
    make_samples,
    padded,
    positions_only,
    truth_of,
)
from torch import Tensor
from torch.nn.functional import pad
from training_step import call, gradients, patched, step
from untested_classes import NOTICE, Tomorrow
from untested_classes import make_model as make_own_model

from liger_patch import apply_patch, patch_status


def weights_of(ids: Sequence[int]) -> list[float]:
    """A weight follows from its token, so that no test needs to know on which way it came. Some are
    0; all are sums of few powers of 2, which float32 holds.
    """
    return [(each * 5 % 8) / 4 for each in ids]


def weights_beside(batch: dict[str, Tensor]) -> Tensor:
    return torch.tensor([weights_of(row) for row in batch["input_ids"].tolist()])


@pytest.mark.parametrize("ordinary", [False, True], ids=["fused", "LIGER_PATCH_RETURN_LOGITS=1"])
@pytest.mark.parametrize("collate", [padded, flattened, positions_only])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_the_loss_is_the_weighted_mean(
    model_type: str, collate: Any, ordinary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of packed rows whose labels are not masked where a sequence begins."""
    model, samples = make_model(model_type), make_samples(9, 4, 13, prompts=collate is padded)
    model.config.output_router_logits = False
    truth = truth_of(model, samples, weights_of=weights_of)
    batch = collate(samples)
    if ordinary:
        monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    with patched(model):
        found = step(model, batch, loss_weights=weights_beside(batch))
        assert patch_status(model).fused is not ordinary
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("prompts", [True, False])
def test_weights_give_the_mean_of_each_sequences_own_mean(prompts: bool, calls: int) -> None:
    """As docs/integrations.md has it: of packed rows, in one call or in several of a step."""
    model, samples = make_model(), make_samples(9, 4, 13, prompts=prompts)
    truth = truth_of(model, samples, by_sequence=True)
    losses = []
    with patched(model):
        for part in (samples,) if calls == 1 else (samples[:1], samples[1:]):
            counts = [sum(label != IGNORED for label in each["labels"][1:]) for each in part]
            weights = [1 / n for n, s in zip(counts, part, strict=True) for _ in s["labels"]]
            how = {"loss_weights": torch.tensor([weights]).double()}
            how |= {} if calls == 1 else {"num_items_in_batch": len(samples)}
            losses.append(call(model, flattened(part), **how).loss)
    loss = torch.stack(losses).sum()
    torch.testing.assert_close({"loss": loss.detach(), **gradients(model, loss)}, truth)


def test_weights_beside_shift_labels_are_theirs() -> None:
    model, samples = make_model(), make_samples(9, 4, 13)
    truth, batch = truth_of(model, samples, weights_of=weights_of), padded(samples)
    weights = pad(weights_beside(batch)[:, 1:], (0, 1))
    targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    with patched(model):
        found = step(model, {**batch, "shift_labels": targets}, loss_weights=weights)
    torch.testing.assert_close(found, truth)


class ShiftsLabels(Tomorrow):
    """Makes ``shift_labels`` of its labels: those behind each token."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Any:
        targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
        return self.loss_function(logits, labels, self.config.vocab_size, shift_labels=targets)


class TakesLabelsAsTheyAre(Tomorrow):
    """Predicts its labels in their own places, as the decoder of an encoder-decoder model does."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Any:
        return self.loss_function(logits, None, self.config.vocab_size, shift_labels=labels)


class SkipsToken(Tomorrow):
    """Predicts the label behind the next one, as a layer of multi-token prediction does."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Any:
        return super().loss_of(logits, pad(labels[:, 1:], (0, 1), value=IGNORED))


def test_weights_follow_labels_of_which_a_model_makes_shift_labels() -> None:
    model, samples = make_own_model(ShiftsLabels).double(), make_samples(9, 4, 13)
    truth, batch = truth_of(model, samples, weights_of=weights_of), padded(samples)
    weights = weights_beside(batch)
    apply_patch(model, layers=False)
    with pytest.warns(UserWarning, match=NOTICE):
        found = step(model, batch, loss_weights=weights)
    torch.testing.assert_close(found, truth)


@pytest.mark.filterwarnings("ignore:liger_patch has no test of:UserWarning")
@pytest.mark.parametrize("cls", [SkipsToken, TakesLabelsAsTheyAre])
@pytest.mark.parametrize("same", [False, True], ids=["", "one label"])
def test_weights_of_labels_that_a_model_moves_elsewhere_are_an_error(cls: Any, same: bool) -> None:
    model, batch = apply_patch(make_own_model(cls)), padded(make_samples(9, 4))
    if same:
        batch["labels"][batch["labels"] != IGNORED] = 5
    with pytest.raises(ValueError, match="loss_weights cannot follow labels that the model's own"):
        call(model, batch, loss_weights=weights_beside(batch))


def test_weights_of_zero_give_zero() -> None:
    model, batch = apply_patch(make_model()), padded(make_samples(9, 4))
    loss = call(model, batch, loss_weights=torch.zeros(batch["labels"].shape)).loss
    assert loss == 0
    assert not any(slope.any() for slope in gradients(model, loss).values() if slope is not None)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(2, 8), r"the shape of the labels \(2, 9\), got \(2, 8\)"),
        (torch.ones(9), r"the shape of the labels \(2, 9\), got \(9,\)"),
        (torch.ones(2, 9, dtype=torch.int64), r"a floating-point tensor .*got torch\.int64"),
        ([[1.0] * 9] * 2, "a floating-point tensor .*got list"),
        (torch.ones(2, 9, requires_grad=True), "a gradient: none is computed"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(weights: Any, message: str) -> None:
    model, batch = apply_patch(make_model()), padded(make_samples(9, 4))
    with pytest.raises(ValueError, match=f"loss_weights must (be|have|not require) {message}"):
        call(model, batch, loss_weights=weights)


def test_a_loss_of_the_models_own_takes_no_weights() -> None:
    model = apply_patch(make_model())
    model.loss_function = lambda logits, labels, **_: logits.float().mean()
    batch = padded(make_samples(9, 4))
    with pytest.raises(ValueError, match="loss_weights cannot reach the loss that LlamaForCausal"):
        call(model, batch, loss_weights=torch.ones(2, 9))


def test_a_call_without_labels_has_no_use_for_weights() -> None:
    model, batch = make_model(), padded(make_samples(9, 4))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = call(model, inputs).logits
    with patched(model):
        assert torch.equal(call(model, inputs, loss_weights=torch.ones(2, 9)).logits, expected)
