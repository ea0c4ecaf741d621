"""LIGER_PATCH_VERIFY=1: a broken kernel is found at the first training step, and not used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from slow_cases import slow_but
from tiny_models import VOCAB_SIZE, tiny_batch, tiny_model
from torch import Tensor
from training_step import assert_right, call, step, widened

from liger_patch import apply_patch, patch_status
from liger_patch.deferred.fuse import HeadProduct
from liger_patch.kernels.head import gradients
from liger_patch.kernels.head import logits as head_logits
from liger_patch.patch import verify
from liger_patch.patch.forward import record_of


@pytest.fixture(autouse=True)
def every_step_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_PATCH_VERIFY", "1")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each comparison found."""
    found = []
    disagreement = verify.disagreement

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found.append(disagreement(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(verify, "disagreement", recorded)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"reduction": "sum"}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi", "cohere"])
def test_a_sound_model_agrees_and_stays_fused(
    verified: list[Any], model_type: str, dtype: Any, options: dict[str, Any]
) -> None:
    autocast = dtype == "autocast"
    model = apply_patch(
        tiny_model(model_type, dtype=torch.float32 if autocast else dtype), **options
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs = call(model, tiny_batch(model))
    assert verified == [None]
    assert patch_status(model).fused
    assert not outputs.logits.is_computed


def test_only_the_first_training_step_is_compared_and_with_the_flag(
    verified: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply_patch(tiny_model())
    with torch.no_grad():
        call(model, tiny_batch(model))
    for value in ("0", ""):
        monkeypatch.setenv("LIGER_PATCH_VERIFY", value)
        call(model, tiny_batch(model))
    assert verified == []
    monkeypatch.setenv("LIGER_PATCH_VERIFY", "1")
    model = apply_patch(tiny_model())
    for _ in range(3):
        call(model, tiny_batch(model))
    assert verified == [None]


def test_the_comparison_leaves_loss_and_gradients_as_they_are() -> None:
    model = apply_patch(tiny_model())
    assert_same_bits(step(model, tiny_batch(model)), step(model, tiny_batch(model)))


def no_head_gradient(product_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def broken(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
        product_(out, a, b, add=add)
        return out.zero_() if len(out) == VOCAB_SIZE else out

    return broken


def wrong_losses(rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: rows(*args, **kwargs).mul_(1.01)


def gradients_of(value: float, rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def broken(*args: Any, dlogits: Tensor | None = None, **kwargs: Any) -> Tensor:
        losses = rows(*args, dlogits=dlogits, **kwargs)
        if dlogits is not None:
            dlogits.fill_(value)
        return losses

    return broken


DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STATES = "gradient of the hidden states"


@pytest.mark.parametrize(
    ("module", "function", "replacement", "differs"),
    [
        (gradients, "product_", no_head_gradient, "gradient of the weight"),
        (head_logits, "cross_entropy_rows", wrong_losses, "loss"),
        (head_logits, "cross_entropy_rows", partial(gradients_of, 0.0), STATES),
        (head_logits, "cross_entropy_rows", partial(gradients_of, float("nan")), STATES),
    ],
    ids=["head", "loss", "zero gradients", "nan gradients"],
)
def test_a_broken_kernel_is_named_and_the_model_goes_on_unfused(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    function: str,
    replacement: Callable,
    differs: str,
) -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    truth, eager = step(widened(model), batch), step(model, batch)
    monkeypatch.setattr(module, function, replacement(getattr(module, function)))
    apply_patch(model)
    message = f"LIGER_PATCH_VERIFY found a difference .* The fused {differs} is off by"
    with pytest.warns(UserWarning, match=message) as warned:
        first = step(model, batch)
    assert len(warned) == 1
    second = step(model, batch)  # without a warning: pytest makes an error of it
    status = patch_status(model)
    assert status.fused is False
    assert status.reason in str(warned[0].message)
    assert_right(first, eager, truth)
    assert_right(second, eager, truth)


def test_a_distributed_vocabulary_is_not_compared_and_a_warning_says_so(
    verified: list[Any],
) -> None:
    model = apply_patch(tiny_model())
    record, (product, labels) = record_of(model), learnt(torch.float32, 1.0, None)
    assert record is not None
    vars(product.weight)["_local_tensor"] = product.weight  # as a DTensor's
    logits: Any = None
    with pytest.warns(UserWarning, match="does not verify a head whose vocabulary is distributed"):
        assert verify.why_distrusted(record, logits, product, labels) is None
    assert verified == []


def learnt(
    dtype: torch.dtype, scale: float, softcap: float | None, tokens: int = 20
) -> tuple[HeadProduct, Tensor]:
    """A head whose labels are likely: with a large scale, all others are next to impossible."""
    labels, weight = torch.randint(131, (tokens,)), torch.randn(131, 16)
    states = scale * (weight[labels] + 0.3 * torch.randn(tokens, 16))
    return HeadProduct(states.to(dtype), weight.to(dtype), None, None, 1.0, softcap, None), labels


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(
    ("softcap", "options"), [(None, {}), (None, {"label_smoothing": 0.1}), (5.0, {}), (30.0, {})]
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], DTYPES), ids=str)
def test_rounding_is_no_difference(
    dtype: torch.dtype, scale: float, softcap: float | None, options: Any, tokens: int
) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        parts, labels = learnt(dtype, scale, softcap, tokens)
        assert verify.disagreement(parts, labels, **options) is None


WRONG: dict[str, Callable[[Tensor], dict[str, Any]]] = {  # of the labels
    "labels": lambda labels: {"labels": labels.roll(1)},
    "weights": lambda _: {"token_weight": 1 + torch.arange(20) % 2 / 2},
    "scale": lambda _: {"logit_scale": 1.2},
    "softcap": lambda _: {"softcap": 8.0},
    "smoothing": lambda _: {"label_smoothing": 0.2},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_arguments_are_found(
    dtype: torch.dtype, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear_cross_entropy = verify.linear_cross_entropy

    def broken(states: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        given = {**options, "labels": labels, **WRONG[wrong](labels)}
        return linear_cross_entropy(states, weight, **given)

    monkeypatch.setattr(verify, "linear_cross_entropy", broken)
    parts, labels = learnt(dtype, 0.1, 5.0)
    assert "found a difference" in str(verify.disagreement(parts, labels))


@pytest.mark.parametrize("weight", [None, float("nan"), float("inf")])
def test_a_loss_of_nothing_or_not_finite_leaves_the_comparison_to_the_next(
    weight: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch without supervised tokens, or of a head of these weights."""
    model = apply_patch(tiny_model())
    batch, own = tiny_batch(model), model.lm_head.weight.data.clone()
    if weight is None:
        assert call(model, batch | {"labels": torch.full_like(batch["labels"], -100)}).loss == 0
    else:
        model.lm_head.weight.data.fill_(weight)
        assert not call(model, batch).loss.isfinite()
    model.lm_head.weight.data.copy_(own)
    monkeypatch.setattr(gradients, "product_", no_head_gradient(gradients.product_))
    with pytest.warns(UserWarning, match="LIGER_PATCH_VERIFY found a difference"):
        call(model, batch)


@pytest.mark.parametrize(("length", "hopper_kernels"), [(256, None), (257, True)])
def test_the_kernels_of_the_batch_are_compared(
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., list[Any]],
    verified: list[Any],
    length: int,
    hopper_kernels: bool | None,
) -> None:
    """Hopper has others for small batches, as the slice that is compared is one."""
    asked = record(
        verify, "linear_cross_entropy", lambda x, *_, **how: (len(x), how["hopper_kernels"])
    )
    monkeypatch.setattr("liger_patch.kernels.head.odds.SMALL_BATCH", 512)
    model = apply_patch(tiny_model())
    ids = torch.randint(VOCAB_SIZE, (2, length))
    model(input_ids=ids, labels=ids).loss.backward()
    assert verified == [None]
    assert asked == [(256, hopper_kernels)]
