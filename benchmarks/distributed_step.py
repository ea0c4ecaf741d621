"""Measure training steps of whole models on several GPUs, and a head with a distributed vocabulary.

    python -m benchmarks distributed_step --gpus 2
    python -m benchmarks distributed_step --gpus 4 --engine FSDP2 --model Qwen
    python -m benchmarks distributed_step --device cpu --gpus 2      tiny, to try the script

Each row starts a process a GPU. Steps: forward and backward in bf16, each rank with a batch of its
own (tensor parallel: one for all); under ZeRO-3 with an SGD step of rate 0, which frees its
gradients. Time is that of the slowest rank, by CUDA events; memory the highest peak of a rank over
its shards of the weights. Collectives of one step are counted on the first rank, by kind and MiB.
A contender whose first loss is not eager's is wrong.

The head alone, tensor parallel: PyTorch's loss_parallel, ours, and our operator on one shard alone,
as if it were the whole vocabulary, without communication.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import multiprocessing
from transformers import LlamaConfig

from .benchmark import Benchmark, Cases
from .distributed_contenders import (
    CONTENDERS,
    ENGINES,
    HEADS,
    Head,
    HeadRequest,
    Request,
    measure_head,
    measure_step,
    run_rank,
)
from .lora_step import LLAMA, QWEN
from .measure import Failure, attempt
from .models import Model
from .training_step import MAX_LOSS_DIFFERENCE

MODELS = (LLAMA.resized(4, 2048), QWEN.resized(2, 2048))  # a GPU
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4}
TINY = Model("tiny", LlamaConfig(**SIZES, **ATTENTION), sequences=2, length=16)
HEAD_SHAPES = (
    Head("Llama-3-8B", tokens=8192, hidden_size=4096, vocab_size=128256),
    Head("Qwen3-8B", tokens=8192, hidden_size=4096, vocab_size=151936),
)
TINY_HEAD = Head("tiny", tokens=32, hidden_size=64, vocab_size=128)


def run_model(
    model: Model, engine: str, names: list[str], *, gpus: int, rounds: int, device: str
) -> list[dict]:
    """Measure each contender of one model under one engine, in processes of its own."""
    rows = []
    for name in names:
        request = Request(model, engine, name, rounds, device)
        row = {"model": f"{model.name}, {engine}, {gpus} GPUs", "contender": name, "gpus": gpus}
        rows.append(row | _in_processes(measure_step, request, gpus))
    truth = rows[0].get("loss")  # eager's
    for row in rows:
        if truth is None or "loss" not in row:
            continue
        if not abs(row["loss"] - truth) <= MAX_LOSS_DIFFERENCE * abs(truth):  # nan is wrong
            row["wrong"] = True
    return rows


def run_head(head: Head, *, gpus: int, rounds: int, device: str) -> list[dict]:
    """Measure the contenders of one head, a vocabulary over all GPUs."""
    title = f"{head.name} head, {head.tokens} tokens, {gpus} GPUs"
    rows = []
    for name in HEADS:
        found = _in_processes(measure_head, HeadRequest(head, name, rounds, device), gpus)
        rows.append({"model": title, "contender": name, "gpus": gpus} | found)
    return rows


def _in_processes(function, request, gpus: int) -> dict:
    """Return what the first rank has written, or why a rank has not."""
    print(f"{request.name}: {function.__name__} ...", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        start = partial(
            multiprocessing.start_processes,
            run_rank,
            args=(function, request, gpus, folder),
            nprocs=gpus,
            start_method="spawn",
        )
        done = attempt(start)
        for file in sorted(Path(folder).glob("failure*.json")):  # of the first rank that has one
            return json.loads(file.read_text(encoding="utf-8"))
        if isinstance(done, Failure):
            return asdict(done)
        return json.loads((Path(folder) / "row.json").read_text(encoding="utf-8"))


def cases(options: argparse.Namespace) -> Cases:
    """Return a case for each model and engine that the options choose, and one for each head."""
    gpus = options.gpus or max(2, torch.cuda.device_count())
    how = {"gpus": gpus, "rounds": options.rounds, "device": options.device}
    on_cpu = options.device == "cpu"
    if on_cpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [n for n in CONTENDERS if n == "eager" or n in (options.contender or CONTENDERS)]
    chosen = options.model or [""]
    found = {
        "distributed_steps": [
            partial(run_model, model, engine, names, **how)
            for model in ((TINY,) if on_cpu else MODELS)
            for engine in options.engine or ENGINES
            if any(part in model.name for part in chosen) and engine != "head"
        ],
        "distributed_heads": [
            partial(run_head, head, **how)
            for head in ((TINY_HEAD,) if on_cpu else HEAD_SHAPES)
            if any(part in head.name for part in chosen) and "head" in (options.engine or ["head"])
        ],
    }
    return {key: each for key, each in found.items() if each}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, help="processes, one a GPU (default all)")
    parser.add_argument(
        "--engine", action="append", choices=[*ENGINES, "head"], help="only this, or another"
    )
    parser.add_argument(
        "--model", action="append", help="only the models whose name contains this, or another"
    )
    parser.add_argument(
        "--contender", action="append", choices=CONTENDERS, help="only eager and this, or another"
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny, measures nothing"
    )


BENCHMARK = Benchmark(
    packages=("transformers", "accelerate", "deepspeed"),
    cases=cases,
    rounds=8,
    add_options=_add_options,
)
