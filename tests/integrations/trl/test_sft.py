"""SFT with TRL: TRL's own numbers and weights, from logits that nobody holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import ROWS, VOCAB_SIZE, tiny_model
from tiny_text import conversations
from trainers import LargestTensor
from training_step import Step, assert_fused, joined, widened
from trl_models import MARKS, assert_same, lora, sft_trainer, train

pytestmark = MARKS
STEPS = 8


def prompt_tuning() -> dict[str, Any]:
    import peft

    return {"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)}


MODES: dict[str, dict[str, Any]] = {  # arguments of sft_trainer; a function makes the options
    "plain": {},
    "packing": {"packing": True, "max_length": 16},
    "packing, cut": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "padding_free": {"padding_free": True, "max_length": None},
    "accumulation": {"gradient_accumulation_steps": 2},
    "dft": {"loss_type": "dft"},
    "lora": {"options": lora},
    "assistant alone": {"assistant_only_loss": True, "data": conversations},
    "prompts, too": {"completion_only_loss": False},
    "lora, head saved": {"options": lambda: lora(modules_to_save=["lm_head"])},
    "prompt tuning": {"options": prompt_tuning},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},  # TRL computes it of ordinary logits
}


def sft(model_type: str, mode: dict[str, Any], folder: Path, patch: bool | None) -> Step:
    how = {"max_steps": STEPS, **mode, "options": mode.get("options", dict)()}
    if "moe" in model_type:
        how["router_aux_loss_coef"] = 0.5
    trainer = sft_trainer(widened(tiny_model(model_type)), folder, patch, **how)
    if patch and "label_smoothing_factor" in mode:
        with pytest.warns(UserWarning, match="leaves the head to TRL: .* without labels"):
            return train(trainer)
    results = train(trainer)
    if patch:
        assert_fused(trainer.model)
    return results


CASES = [
    *(("llama", name) for name in MODES),
    *((model_type, "plain") for model_type in ("gemma2", "qwen3", "qwen3_moe")),
    ("gemma2", "lora"),
    ("qwen3", "packing"),
    ("qwen3_moe", "accumulation"),  # its auxiliary loss is a mean over the micro-batches
    ("qwen3_moe", "padding_free"),  # without an attention mask
]
OF_EACH_KIND = [
    *(("llama", name) for name in ("plain", "packing", "padding_free", "dft", "lora")),
    *(("llama", name) for name in ("assistant alone", "prompt tuning", "label smoothing")),
    ("gemma2", "plain"),
    ("qwen3_moe", "accumulation"),
]


@pytest.mark.parametrize(("model_type", "mode"), slow_but(OF_EACH_KIND, CASES))
def test_sft_logs_trls_numbers_and_trains_trls_weights(
    model_type: str, mode: str, tmp_path: Path
) -> None:
    trls, ours = (sft(model_type, MODES[mode], tmp_path, patch) for patch in (None, True))
    assert_same(ours, trls)


@pytest.mark.skipif("qwen3_5_text" not in ROWS, reason="not in this Transformers")
def test_padding_free_rows_of_recurrent_layers_train_as_padded_ones(tmp_path: Path) -> None:
    """Which TRL's own do not: a state goes from one sequence into the next."""
    trls = sft("qwen3_5_text", MODES["plain"], tmp_path, None)
    mode = MODES["padding_free"] | {"gradient_checkpointing": True}
    ours = sft("qwen3_5_text", mode, tmp_path, True)
    for numbers in (trls, ours):
        del numbers[f"{STEPS} total_flos"]  # padding counts
    assert_same(ours, trls)


TRLS_DEFAULTS = {"bf16": True, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("model_type", "dtype", "arguments"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.float32, {"bf16": True}),
        ("llama", torch.bfloat16, {}),
        ("gemma2", torch.float32, TRLS_DEFAULTS),
        ("gemma2", torch.bfloat16, {}),
    ],
)
def test_sft_is_no_worse_than_trls(
    model_type: str, dtype: torch.dtype, arguments: dict[str, Any], tmp_path: Path
) -> None:
    results = [train(sft_trainer(widened(tiny_model(model_type)), tmp_path))]
    for patch in (None, True):
        trainer = sft_trainer(tiny_model(model_type, dtype=dtype), tmp_path, patch, **arguments)
        results.append(train(trainer))
    assert_fused(trainer.model)
    for numbers in results:  # in few digits, which token is the likeliest is a matter of luck
        for name in [name for name in numbers if name.endswith("accuracy")]:
            del numbers[name]
    truth, trls, ours = joined(*results)
    low = arguments.get("bf16") or dtype == torch.bfloat16
    assert_no_worse(ours, trls, truth, torch.bfloat16 if low else torch.float32)


@pytest.mark.filterwarnings("ignore:.return_outputs=True.:FutureWarning")  # TRL's, of the logits
def test_compute_metrics_gets_trls_logits(tmp_path: Path) -> None:
    seen: dict[Any, list[Any]] = {None: [], True: []}
    for patch, predictions in seen.items():
        options = {
            "compute_metrics": lambda each, into=predictions: into.append(each.predictions) or {},
            "preprocess_logits_for_metrics": lambda logits, labels: logits * 2,
        }
        trainer = sft_trainer(tiny_model("gemma2"), tmp_path, patch, options=options)
        trainer.evaluate()
    assert len(seen[True]) == len(seen[None]) > 0
    for ours, trls in zip(seen[True], seen[None], strict=True):
        assert np.array_equal(ours, trls)
    assert_fused(trainer.model)


@pytest.mark.parametrize(
    ("model_type", "bf16"), [("llama", True), ("gemma2", False), ("qwen3_moe", True)]
)
def test_training_and_evaluation_hold_no_logits(
    model_type: str, bf16: bool, reads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_CHUNK_MIB", "0.01")
    sizes = {"per_device_train_batch_size": 24, "per_device_eval_batch_size": 24}
    trainer = sft_trainer(tiny_model(model_type), tmp_path, True, bf16=bf16, max_steps=2, **sizes)
    lengths = [len(sample["input_ids"]) for sample in trainer.train_dataset]
    tokens = len(lengths) * max(lengths)  # padded, as logits would be; experts hold K rows of each
    for part in (trainer.train, trainer.evaluate):
        with LargestTensor() as seen:
            part()
        assert 0 < seen.elements < tokens * VOCAB_SIZE
    assert reads == []
    assert_fused(trainer.model)
