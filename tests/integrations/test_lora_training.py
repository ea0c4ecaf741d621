"""LoRA trained by Trainer, on kernels, as eager."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from lora_models import ALL, MLP, OUT, QKV, Calls, adapted
from slow_cases import slow_but
from tiny_models import tiny_batch
from trainers import losses_and_norms
from training_step import Float64

from liger_patch import apply_patch, patch_status

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

pytestmark = [
    pytest.mark.usefixtures("imported_objects_are_not_collected"),
    pytest.mark.filterwarnings("ignore:torch.cpu.amp.autocast:FutureWarning"),
]
STEPS = 5


def trained(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The losses and gradient norms of some steps, and the adapters behind them."""
    history = losses_and_norms(
        model,
        folder,
        tiny_batch(model.get_base_model(), batch=8),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        optim="sgd",
        **options,
    )
    adapters = [p.detach().double().flatten() for n, p in model.named_parameters() if "lora_" in n]
    return {"losses and norms": history, "adapters": torch.cat(adapters)}


@pytest.mark.parametrize(
    ("bf16", "checkpoints"),
    slow_but(
        [(False, None), (True, False), (True, True)],
        list(itertools.product([False, True], [None, False, True])),
    ),
    ids=[f"{name}-{kind}" for name in ("float32", "bf16") for kind in (None, False, True)],
)
def test_the_loss_curve_is_eagers(
    bf16: bool, checkpoints: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With float32 adapters under autocast, as Trainer(bf16=True) runs them."""
    calls = Calls(monkeypatch)
    dtype = torch.bfloat16 if bf16 else torch.float32
    eager_model = adapted(dtype=dtype)
    model, wide = apply_patch(copy.deepcopy(eager_model)), copy.deepcopy(eager_model).double()
    options: dict[str, Any] = {"bf16": bf16}
    if checkpoints is not None:
        options["gradient_checkpointing"] = True
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpoints}
        for each in (eager_model, model):
            each.enable_input_require_grads()
    eager = trained(eager_model, tmp_path, **options)
    calls.clear()
    ours = trained(model, tmp_path, **options)
    groups, by_peft = calls.taken(model)
    assert (groups[:3], by_peft) == ([QKV, OUT, MLP], [])
    assert sum(len(group) for group in groups) == len(ALL) * 2 * 2 * STEPS * (
        1 if checkpoints is None else 2
    )
    assert patch_status(model).fused
    with Float64():
        truth = trained(wide, tmp_path)
    assert_no_worse(ours, eager, truth, dtype)
