"""Measure what a frozen base in 16, 8 and 4 bits rounds, on loss and gradients of LoRA adapters.

    python -m benchmarks frozen_base_check

The truth is the same model, whose weights are those of bf16, in float64. Errors are norms over
those of the truth: of the gradients of all adapters as one. Others run as in ``lora_step.py``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .benchmark import Benchmark, Cases
from .lora_contenders import CONTENDERS, Request, Setting, autocast_loss, fill_adapters
from .lora_step import QWEN, cut_config, save
from .measure import relative_error, release_memory
from .models import Model
from .names import EAGER, FP8, OURS

MODEL = replace(
    QWEN.resized(1, 1024),
    name="Qwen3-8B of 4 layers, 1 x 1024",
    config=cut_config(QWEN.config, 4),
)
BF16, NF4 = Setting("LoRA"), Setting("QLoRA", quantized=True)
WAYS = (EAGER, BF16), (OURS, BF16), (FP8, BF16), (EAGER, NF4), (OURS, NF4)


def run_case(model: Model, *, device: str = "cuda") -> Iterator[dict]:
    """Yield a row of each way."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, device)
        release_memory()
        batch = model.batch(device)
        sizes = model.sequences, model.length
        request = Request("", model.name, folder, *sizes, (), rounds=0, device=device)
        loss, truth = _step(CONTENDERS[EAGER](request, BF16).double(), _loss, batch)
        for contender, setting in WAYS:
            made = CONTENDERS[contender](request, setting)
            found, gradients = _step(made, autocast_loss, batch)
            del made
            release_memory()
            yield {
                "model": f"{model.name}, {setting.name}",
                "contender": contender,
                "loss_error": relative_error(found, loss),
                "gradients_error": relative_error(gradients, truth),
            }


def _step(
    model: Any, loss_of: Callable[[Any, Mapping[str, Tensor]], Tensor], batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    fill_adapters(model)
    loss = loss_of(model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def _loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


def _cases(_: argparse.Namespace) -> Cases:
    return {"frozen_bases": [partial(run_case, MODEL)]}


BENCHMARK = Benchmark(packages=("transformers", "peft", "bitsandbytes"), cases=_cases)
