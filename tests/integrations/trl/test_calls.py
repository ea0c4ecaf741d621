"""TRL's fused head, called: outputs and gradients, of all architectures and kinds of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from rows import every_row, is_known_well
from rows import model_type as row_name
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor, nn
from torch.nn.functional import linear
from training_step import Float64, Step, assert_fused, widened
from transformers import PreTrainedModel
from trl_models import MARKS, OUTPUTS, apply_trl_patch, assert_same, call, with_head
from truths import linear_log_probs, log_probs

from liger_patch import registry

pytestmark = MARKS


def shifted(batch: Batch) -> Batch:
    """As context parallelism passes labels."""
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    return {"shift_labels": labels, **{k: v for k, v in batch.items() if k != "labels"}}


def unsupervised(batch: Batch) -> Batch:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        pytest.param(dict, {}, id="labels"),
        pytest.param(shifted, {}, id="shift_labels"),
        pytest.param(dict, {"num_items_in_batch": 7}, id="num_items_in_batch"),
        pytest.param(dict, {"output_router_logits": False}, id="no output_router_logits"),
        pytest.param(unsupervised, {}, id="no label"),
    ],
)
@pytest.mark.parametrize(
    ("outputs", "model_type"),
    [(OUTPUTS, "qwen3_moe"), (("log_probs", "entropy"), "gemma2"), (("log_probs",), "llama")],
    ids=["all", "two", "one"],
)
def test_a_call_gives_trls_outputs_and_gradients(
    model_type: str,
    outputs: tuple[str, ...],
    change: Callable[[Batch], Batch],
    arguments: dict[str, Any],
) -> None:
    model = with_head(widened(tiny_model(model_type)), outputs, temperature=0.7)
    batch = change(tiny_batch(model))
    trls = call(model, batch, **arguments)
    ours = call(apply_trl_patch(model), batch, **arguments)
    assert_fused(model)
    assert_same(ours, trls)
    for name, value in trls.items():
        assert getattr(ours[name], "dtype", None) == getattr(value, "dtype", None), name


# TRL's own head fails: names in the config, or a backbone that base_model is not
TRL_FAILS = ("granitemoe", "llama4", "llama4_text", "mllama_text_model")
TRL_IS_WRONG = ("recurrent_gemma",)  # its softcap has another name


@pytest.mark.parametrize("row", every_row(), ids=row_name)
def test_every_architecture_gives_the_log_probabilities_of_its_logits(
    row: registry.Architecture,
) -> None:
    model = widened(tiny_model(row))
    if model.config.is_encoder_decoder:
        pytest.skip("TRL has no head for an encoder-decoder model")
    with_head(model.eval(), temperature=0.7)  # some have dropout by default
    batch = tiny_batch(model)
    labels = batch["labels"][:, 1:]
    with Float64(), torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits[:, :-1]
        found = log_probs(logits.flatten(0, 1), labels.flatten(), temperature=0.7)
        truth = {name: getattr(found, name).view_as(labels) for name in OUTPUTS}
        trls = {}
        if is_known_well(row) and row.model_type not in TRL_FAILS + TRL_IS_WRONG:
            trls = model(**batch, fused_lm_head=True)
        ours = apply_trl_patch(model)(**batch, fused_lm_head=True)
    assert_fused(model)
    assert torch.equal(ours.label_mask, labels != -100)
    assert_same({name: ours[name] for name in truth}, truth)
    assert_same({name: ours[name] for name in trls}, dict(trls))


def cast_head(model: PreTrainedModel) -> None:
    """As TRL's trainers of rewards do for ``cast_lm_head_to_fp32``."""
    head = model.lm_head.float()
    head.forward = lambda hidden_states: linear(hidden_states.float(), head.weight.float())


@pytest.mark.parametrize(
    ("dtype", "autocast", "change"),
    [
        pytest.param(torch.float32, True, None, id="float32 under autocast"),
        pytest.param(torch.bfloat16, False, cast_head, id="bfloat16 with TRL's head"),
        pytest.param(torch.bfloat16, True, cast_head, id="bfloat16 with TRL's head under autocast"),
    ],
)
def test_a_head_in_float32_is_multiplied_in_float32(
    dtype: torch.dtype, autocast: bool, change: Callable[[Any], None] | None
) -> None:
    model = tiny_model(dtype=dtype)
    if change is not None:
        change(model)
    options = {"temperature": 0.7, "cast_lm_head_to_fp32": True}
    with_head(model, ("log_probs", "entropy"), **options)
    batch = tiny_batch(model)
    states: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda *args: states.append(args[-1]))

    def results() -> Step:
        states.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(**batch, fused_lm_head=True)
        states[0].retain_grad()
        (outputs.loss + outputs.entropy.sum()).backward()
        gradients = {"states": states[0].grad, "weight": model.lm_head.weight.grad}
        values = {name: outputs[name].detach() for name in ("loss", "log_probs", "entropy")}
        model.zero_grad()
        return {**values, **gradients}

    trls = results()
    wide = {
        name: value.detach().double().requires_grad_()
        for name, value in (("states", states[0]), ("weight", model.lm_head.weight))
    }
    labels = batch["labels"][:, 1:]
    inputs = wide["states"][:, :-1].flatten(0, 1), wide["weight"], labels.flatten()
    found = linear_log_probs(*inputs, temperature=0.7)
    value = -found.log_probs.sum() / (labels != -100).sum()
    (value + found.entropy.sum()).backward()
    truth = {name: getattr(found, name).view_as(labels) for name in ("log_probs", "entropy")}
    truth["loss"] = value
    truth |= {name: each.grad for name, each in wide.items()}

    apply_trl_patch(model, layers=False)
    ours = results()
    assert_fused(model)
    assert {name: value.dtype for name, value in ours.items()} == {
        name: value.dtype for name, value in trls.items()
    }
    low = states[0].dtype  # of one gradient, which is rounded to it
    for name in truth:
        digits = low if name == "states" else torch.float32
        assert_no_worse({name: ours[name]}, {name: trls[name]}, {name: truth[name]}, digits)


def test_the_number_of_tokens_in_a_chunk_is_the_environments_or_the_models(
    monkeypatch: pytest.MonkeyPatch, record: Callable[..., list[Any]]
) -> None:
    from liger_patch.integrations import trl_head as ours

    passed = record(ours, "fused_log_probs", lambda *_, **options: options["chunk_mib"])
    model = with_head(tiny_model())
    batch = tiny_batch(model)
    for chunk_mib in (None, 3.0):
        apply_trl_patch(model, chunk_mib=chunk_mib)
        model(**batch, fused_lm_head=True)
    monkeypatch.setenv("LIGER_PATCH_CHUNK_MIB", "0.5")
    model(**batch, fused_lm_head=True)
    assert passed == [None, 3.0, 0.5]
