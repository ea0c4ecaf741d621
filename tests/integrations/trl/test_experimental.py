"""TRL's experimental ORPO and CPO trainers: TRL's own numbers and weights, without logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_text import preferences, tiny_tokenizer
from training_step import widened
from trl_models import (
    DEFAULTS,
    LEFT_TO_TRL,
    MARKS,
    assert_fused,
    assert_same,
    lora,
    make_model,
    train,
)

from liger_patch import patch_status

pytestmark = MARKS


def make_trainer(
    kind: str, model_type: str, folder: Path, flag: bool | None, *, adapters: Any = None, **how: Any
) -> Any:
    """Of TRL, with its configuration, for None; else of this package, with the flag on or off."""
    from trl.experimental import cpo, orpo

    from liger_patch.integrations import trl_preferences as ours

    trls = {"ORPO": orpo, "CPO": cpo}[kind]
    module = trls if flag is None else ours
    how = {**DEFAULTS, "max_length": 32, **how}
    if flag is not None:
        how["use_liger_patch"] = flag
    model = widened(make_model(model_type))
    if "moe" in model_type:
        model.config.output_router_logits = True
    samples = preferences()
    return getattr(module, f"{kind}Trainer")(
        model=model,
        args=getattr(module, f"{kind}Config")(str(folder), **how),
        train_dataset=samples,
        eval_dataset=samples,
        processing_class=tiny_tokenizer(),
        **({} if adapters is None else lora(target_modules=adapters)),
    )


@pytest.mark.parametrize(
    ("kind", "model_type", "how"),
    [
        pytest.param("ORPO", "llama", {}, id="orpo"),
        pytest.param("ORPO", "gemma2", {}, id="orpo, softcap"),
        pytest.param("ORPO", "qwen3_moe", {}, id="orpo, auxiliary loss"),
        pytest.param("ORPO", "llama", {"adapters": ["q_proj", "lm_head"]}, id="orpo, lora on head"),
        pytest.param("CPO", "llama", {}, id="cpo"),
        pytest.param("CPO", "gemma2", {"loss_type": "simpo", "cpo_alpha": 0.0}, id="simpo"),
        pytest.param("CPO", "llama", {"loss_type": "ipo"}, id="cpo, ipo"),
        pytest.param("CPO", "llama", {"adapters": ["q_proj", "lm_head"]}, id="cpo, lora on head"),
        pytest.param("CPO", "llama", {"gradient_accumulation_steps": 2}, id="cpo, accumulation"),
    ],
)
def test_answers_are_trained_with_trls_numbers(
    kind: str, model_type: str, how: dict[str, Any], reads: list[Any], tmp_path: Path
) -> None:
    trls = train(make_trainer(kind, model_type, tmp_path, None, **how))
    trainer = make_trainer(kind, model_type, tmp_path, True, **how)
    ours = train(trainer)
    assert reads == []
    assert_fused(trainer.model)
    assert_same(ours, trls)
    assert {"3 logits/chosen", "3 logps/rejected", "3 nll_loss", "3 eval_loss"} <= ours.keys()


@pytest.mark.parametrize("kind", ["ORPO", "CPO"])
def test_without_the_flag_or_with_logits_it_is_trls(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trls = train(make_trainer(kind, "llama", tmp_path, None))
    trainer = make_trainer(kind, "llama", tmp_path, False)
    assert_same(train(trainer), trls)
    assert not patch_status(trainer.model).patched
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    assert_same(train(make_trainer(kind, "llama", tmp_path, True)), trls)


def test_a_head_that_cannot_be_fused_is_trls(tmp_path: Path) -> None:
    trls, ours = (make_trainer("CPO", "llama", tmp_path, flag) for flag in (None, True))
    for trainer in (trls, ours):
        trainer.model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=f"{LEFT_TO_TRL}: backward hooks of the head"):
        results = train(ours)
    assert_same(results, train(trls))
