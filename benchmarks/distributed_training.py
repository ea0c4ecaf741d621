"""Train with Trainer in each of the processes that ``distributed_convergence.py`` starts: first
alone, each process another contender, then all together under each engine.

Each process sees one GPU, so that Trainer takes no other when it trains alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from examples.corpus import Corpus
from examples.small_model import move_within_rounding, small_model
from liger_patch import apply_patch, patch_status

from .distributed_contenders import compile_no_collectives, join, leave
from .measure import release_memory
from .names import EAGER, OURS

ALONE, ROUNDED = "one GPU", f"{EAGER}, rounded"
ROUNDINGS = 4  # of the first weights: one drifts 0.0026 nats, another 0.0089


@dataclass(frozen=True)
class Settings:
    """Settings of every run. ``length`` is in tokens, ``batch_size`` in sequences of all ranks."""

    device: str = "cuda"
    dtype: str = "bfloat16"  # of mixed precision; "float32": none
    vocab_size: int = 8192
    hidden_size: int = 256
    layers: int = 4
    length: int = 256
    batch_size: int = 16
    steps: int = 200
    learning_rate: float = 1e-3


def train_all(
    _: int, rank: int, ranks: int, settings: Settings, corpus: Corpus, folder: str
) -> None:
    """Train every contender under every engine, and write the rows that this process has."""
    rows = []
    alone = [(EAGER, 0), *((ROUNDED, draw) for draw in range(ROUNDINGS)), (OURS, 0)]
    for name, draw in alone[rank::ranks]:  # rank 0 has the first, whatever ranks is
        rows.append(_row(ALONE, name, settings, corpus, settings.batch_size, draw))
    join(rank, ranks, folder, settings.device, local_rank=0)
    for engine in ENGINES:
        for name in (EAGER, OURS):
            row = _row(engine, name, settings, corpus, settings.batch_size // ranks)
            if rank == 0:
                rows.append(row)
    (Path(folder) / f"rows{rank}.json").write_text(json.dumps(rows), encoding="utf-8")
    leave()


def _row(
    engine: str, name: str, settings: Settings, corpus: Corpus, batch_size: int, draw: int = 0
) -> dict:
    set_seed(0)
    model = small_model(
        "llama",
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        length=settings.length,
        eos_token_id=corpus.end_of_file_id,
    )
    torch.manual_seed(draw)  # of what is moved within rounding; Trainer sets another
    _prepare(name, settings)(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=batch_size,
            learning_rate=settings.learning_rate,
            warmup_steps=settings.steps // 10,
            bf16=settings.dtype == "bfloat16",
            use_cpu=settings.device == "cpu",
            dataloader_pin_memory=settings.device == "cuda",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **ENGINES[engine](model, settings) if engine != ALONE else {},
        )
        if engine == "FSDP2" and settings.device == "cpu":  # which accelerate does not shard over
            from accelerate.utils import DistributedType

            arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
        data: Any = [{"input_ids": block, "labels": block} for block in corpus.train]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)  # a line a step
        trainer.train()
    status = patch_status(model)
    row = {"engine": engine, "contender": name, "patched": status.patched}
    if status.patched:
        row |= {"fused": status.fused, "reason": status.reason}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for variable in [each for each in os.environ if each.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[variable]  # that Trainer has set for this engine
    release_memory()
    return row | {"wrapper": type(trainer.model_wrapped).__name__, "training": losses}


def _prepare(name: str, settings: Settings) -> Callable[[nn.Module], object]:
    dtype = getattr(torch, settings.dtype)
    rounded = partial(move_within_rounding, dtype=dtype)
    return {EAGER: lambda model: model, ROUNDED: rounded, OURS: apply_patch}[name]


def _fsdp2(model: nn.Module, settings: Settings) -> dict[str, Any]:
    units = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {"fsdp": True, "fsdp_config": units}


def _zero3(model: nn.Module, settings: Settings) -> dict[str, Any]:
    if settings.device == "cpu":
        compile_no_collectives()
    config = {
        # the least number of elements that is partitioned: by default, most of a small model is not
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return {"deepspeed": config}


# DeepSpeed replaces torch's linear for the rest of the process: last
ENGINES = {"FSDP2": _fsdp2, "ZeRO-3": _zero3}
