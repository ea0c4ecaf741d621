"""The benchmark of mixtures: full training, and models that are made with experts in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from benchmarks.lora_contenders import Request, is_measured, rows
from benchmarks.moe_step import CASES, FULL, MXFP4, NF4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning",
        "ignore:Unsupported layer type:UserWarning",  # PEFT 0.18
    ),
]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
QWEN = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=64)
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=4, intermediate_size=64)


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., Request]:
    def request(contender: str, config: Any, setting: Any) -> Request:
        if setting.held:
            config.save_pretrained(tmp_path)
        elif not (tmp_path / "config.json").exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
        folder = str(tmp_path)
        return Request(
            contender, "tiny", folder, 2, 9, (setting,), rounds=1, device="cpu", attention="eager"
        )

    return request


@pytest.mark.parametrize("setting", FULL, ids=lambda setting: setting.name)
def test_full_training_is_eagers(request_of: Callable[..., Request], setting: Any) -> None:
    (eager,), (ours,) = (list(rows(request_of(c, QWEN, setting))) for c in ("eager", "liger_patch"))
    assert ours["loss"] == pytest.approx(eager["loss"], rel=5e-3)
    assert ours["gradient_norm"] == pytest.approx(eager["gradient_norm"], rel=0.05)
    model = AutoModelForCausalLM.from_config(QWEN)
    assert ours["trained"] == eager["trained"] == sum(p.numel() for p in model.parameters())
    assert ours["ms"] > 0


HELD = {NF4: QWEN, MXFP4: GPT_OSS}


@pytest.mark.parametrize("setting", HELD, ids=lambda setting: setting.held)
def test_models_of_experts_in_4_bits_train(
    request_of: Callable[..., Request], setting: Any
) -> None:
    """Where every weight is a random one, the loss is that of guessing."""
    if setting.held == "nf4":
        pytest.importorskip("bitsandbytes")
    (row,) = rows(request_of("liger_patch", HELD[setting], setting))
    assert row["loss"] == pytest.approx(torch.tensor(64.0).log().item(), rel=0.2)
    assert row["gradient_norm"] > 0
    assert row["ms"] > 0
    assert row["trained"] > 0


def test_who_is_measured() -> None:
    names = ("eager", "Liger-Kernel", "Unsloth", "liger_patch")
    found = {
        setting.name: [name for name in names if is_measured(name, case.model.config, setting)]
        for case in CASES
        for setting in case.settings
    }
    assert found[NF4.name] == found[MXFP4.name] == ["liger_patch"]
    assert found[FULL[0].name] == ["eager", "Liger-Kernel", "liger_patch"]
    assert found["LoRA on experts"] == ["eager", "Unsloth", "liger_patch"]
