"""Measure a GRPO update of Unsloth, in the process that ``rl_step.py`` starts.

That process imports Unsloth in front of this module, because it patches Transformers and TRL. Its
trainer leaves out padding and runs each prompt once, where its own check of the first batch agrees.
Model, adapters and checkpointing are Unsloth's: a frozen base in bf16, adapters in float32, under
autocast. It takes TRL up to 1.15: put the folder that has both first on PYTHONPATH.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoConfig

from .lora_contenders import LORA, fill_adapters
from .measure import attempt, measure
from .rl_updates import Update, grpo_loss, make_trainer
from .training_step import first_step, run_step


def request_of(update: Update, folder: str, rounds: int, device: str) -> str:
    """Return what ``main`` is asked for; the folder has config, weights and tokenizer."""
    fields = {name: value for name, value in vars(update).items() if name != "config"}
    return json.dumps({"folder": folder, "rounds": rounds, "device": device, "update": fields})


def main(request: Path, results: Path) -> None:
    """Write the row to ``results``."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    folder, rounds, device = (asked[name] for name in ("folder", "rounds", "device"))
    update = Update(config=AutoConfig.from_pretrained(folder), **asked["update"])
    found = attempt(partial(_measured, update, folder, rounds, device))
    row = found if isinstance(found, dict) else asdict(found)
    results.write_text(json.dumps(row) + "\n", encoding="utf-8")


def _measured(update: Update, folder: str, rounds: int, device: str) -> dict:
    try:
        return _row(update, folder, rounds, device)
    except Exception:
        traceback.print_exc()  # the row has the first line only
        raise


def _row(update: Update, folder: str, rounds: int, device: str) -> dict:
    batch = update.batch(device)
    checkpointing = "unsloth" if update.checkpointing else False
    fast = import_module("unsloth").FastLanguageModel
    how = {
        "max_seq_length": batch["input_ids"].shape[1],
        "use_gradient_checkpointing": checkpointing,
    }
    model, _ = fast.from_pretrained(folder, dtype=torch.bfloat16, load_in_4bit=False, **how)
    lora = LORA | {"r": update.lora_rank, "lora_alpha": LoraConfig().lora_alpha}
    model = fast.get_peft_model(model, **lora, **how)
    fill_adapters(model)
    trainer = make_trainer(model, update, "trl", bf16=True)
    trainer.model.for_training(use_gradient_checkpointing=checkpointing)  # it is made for inference
    loss = partial(grpo_loss, trainer)
    step = partial(run_step, loss, model, batch)
    row: dict[str, Any] = first_step(loss, model, batch)  # checks its ways of computing too
    row["tokens"] = _tokens(model, step)
    (measured,) = measure({"": step}, rounds=rounds, device=device).values()
    attention = model.config._attn_implementation
    return row | {"attention": attention, "trl": version("trl"), **asdict(measured)}


def _tokens(model: Any, step: Callable[[], None]) -> int:
    counts: list[int] = []

    def count(_: nn.Module, arguments: tuple[Tensor]) -> None:
        counts.append(arguments[0].numel())

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    step()
    hook.remove()
    return sum(counts)
