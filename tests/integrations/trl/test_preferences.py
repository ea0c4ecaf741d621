"""Trainings on preferences, DPO and KTO, with TRL: TRL's own numbers and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_text import judgements, preferences
from training_step import assert_fused, widened
from trl_models import MARKS, apply_trl_patch, assert_same, lora, train, trainer_of, trls_calls

from liger_patch import apply_patch, patch_status
from liger_patch.layers.replace import count_layers

pytestmark = MARKS


def preference_trainer(
    kind: str,
    model_type: str,
    folder: Path,
    *,
    reference: bool = True,
    saved: list[str] | None = None,
    **arguments: Any,
) -> Any:
    """DPO or KTO, with a reference model whose weights are others, or adapters."""
    named: dict[str, Any] = {"model": widened(tiny_model(model_type))}
    if reference:
        named["ref_model"] = widened(tiny_model(model_type, seed=1))
    else:
        named |= lora(modules_to_save=saved)
    if "moe" in model_type:
        arguments["router_aux_loss_coef"] = 0.5
    samples = preferences() if kind == "DPO" else judgements()
    return trainer_of(kind, folder, None, samples, named, **arguments)


@pytest.mark.parametrize(
    ("kind", "model_type", "arguments"),
    [
        pytest.param("DPO", "llama", {}, id="dpo", marks=pytest.mark.slow),
        pytest.param("DPO", "gemma2", {}, id="dpo, softcap"),
        pytest.param("DPO", "qwen3_moe", {}, id="dpo, auxiliary loss"),
        pytest.param("DPO", "llama", {"reference": False}, id="dpo, lora"),
        pytest.param(
            "DPO", "llama", {"reference": False, "saved": ["lm_head"]}, id="dpo, head saved"
        ),
        pytest.param("DPO", "llama", {"use_weighting": True}, id="dpo, weighted"),
        pytest.param("DPO", "llama", {"loss_type": ["ipo", "sft"]}, id="dpo, ipo and sft"),
        pytest.param("DPO", "llama", {"ld_alpha": 0.5}, id="dpo, by length"),
        pytest.param("KTO", "llama", {}, id="kto"),
        pytest.param("KTO", "llama", {"reference": False}, id="kto, lora", marks=pytest.mark.slow),
    ],
)
def test_preferences_are_trained_with_trls_numbers(
    kind: str, model_type: str, arguments: dict[str, Any], reads: list[Any], tmp_path: Path
) -> None:
    trls = train(preference_trainer(kind, model_type, tmp_path, **arguments))
    trainer = preference_trainer(kind, model_type, tmp_path, **arguments)
    models = [trainer.model, *([trainer.ref_model] if trainer.ref_model is not None else [])]
    for model in models:
        apply_trl_patch(model)
    with trls_calls() as calls:
        ours = train(trainer)
    assert calls == reads == []
    for model in models:
        assert_fused(model)
    assert_same(ours, trls)
    logged = {"loss", "entropy", "logits/chosen", "logits/rejected", "rewards/chosen"}
    if kind == "DPO":
        logged |= {"mean_token_accuracy", "rewards/accuracies", "rewards/margins", "logps/chosen"}
    assert {f"3 {name}" for name in logged} <= ours.keys()
    assert ours["1 rewards/chosen"].any() == (trainer.ref_model is not None)


def flagged_dpo(folder: Path, prepare: Any) -> Any:
    models = [tiny_model("gemma2", seed=seed) for seed in (0, 1)]
    for model in models:
        prepare(model)
    named = dict(zip(("model", "ref_model"), models, strict=True))
    return trainer_of("DPO", folder, True, preferences(), named)


def test_the_flag_patches_policy_and_reference_with_their_options(tmp_path: Path) -> None:
    trainer = flagged_dpo(tmp_path, lambda each: apply_patch(each, layers=False, chunk_mib=3.0))
    with trls_calls() as calls:
        trainer.train()
    assert calls == []
    for model in (trainer.model, trainer.ref_model):
        assert_fused(model)
        assert "3 MiB a chunk" in str(patch_status(model))
        assert count_layers(model)["rms_norm"] == 0
    with pytest.raises(ValueError, match=r"z_loss.*no part in TRL's loss.*trainer's configuration"):
        flagged_dpo(tmp_path, lambda each: apply_patch(each, z_loss=0.1))
