"""Measure training steps of whole models, forward and backward, beside peers.

    python -m benchmarks training_step                all models
    python -m benchmarks training_step --model Gemma --model Llama --compile
    python -m benchmarks training_step --model packed --model padded

The contenders of a model share one set of weights and one batch, so all of them are interleaved in
this one process; models run one after the other. One step of each is
compared with eager's first: a contender whose loss or gradient differs is not timed. Gradients are
made anew in every step and count as its memory, weights do not. No optimizer, no checkpointing.
The lower bound is eager's matmuls and attentions alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .benchmark import Benchmark, Cases
from .heads import IGNORE_INDEX
from .lower_bounds import step_matmuls
from .measure import Failure, attempt, measure, release_memory
from .model_contenders import NAMES, Loss, contenders, some_contenders
from .models import MODELS, Model
from .names import LOWER_BOUND

MAX_LOSS_DIFFERENCE = 0.02  # of eager's loss
MAX_NORM_DIFFERENCE = 0.05  # of eager's norm of all gradients


def run_model(
    model: Model,
    *,
    rounds: int,
    compiled: bool = False,
    device: torch.device | str = "cuda",
    of: Callable[..., dict[str, Callable[[], Loss]]] = contenders,
) -> list[dict]:
    """Compare, then time every contender on one model, and the lower bound.

    ``of``: returns the contenders of the model.
    """
    rows = attempt(lambda: _rows(model, rounds, compiled, device, of))
    if compiled:
        torch.compiler.reset()  # it holds on to the model
    release_memory()
    if isinstance(rows, Failure):  # of building the model
        return [{"model": model.name, "contender": "eager", **asdict(rows)}]
    return rows


def _rows(
    model: Model,
    rounds: int,
    compiled: bool,
    device: torch.device | str,
    of: Callable[..., dict[str, Callable[[], Loss]]],
) -> list[dict]:
    built, batch = model.build(device), model.batch(device)
    attention = built.config._attn_implementation  # the default, which differs by version
    losses: dict[str, Loss] = {}
    first_steps: dict[str, dict[str, float] | Failure] = {}
    for name, make in of(built, compiled=compiled).items():
        loss = attempt(make)
        if isinstance(loss, Failure):
            first_steps[name] = loss
        else:
            losses[name] = loss
            first_steps[name] = attempt(lambda loss=loss: first_step(loss, built, batch))
    truth = next((first for first in first_steps.values() if isinstance(first, dict)), {})
    right = [name for name, first in first_steps.items() if agrees(first, truth)]
    steps = {name: partial(run_step, losses[name], built, batch) for name in right}
    rows: list[dict] = []
    bounds: dict[str, Callable[[], None]] = {}
    if "eager" in steps:
        bound = attempt(lambda: step_bound(steps["eager"], built, batch))
        if isinstance(bound, Failure):
            rows.append({"model": model.name, "contender": LOWER_BOUND, **asdict(bound)})
        else:
            bounds[LOWER_BOUND] = bound
    measured = measure({**bounds, **steps}, rounds=rounds, device=device)
    rows += [{"model": model.name, "contender": name, **asdict(measured[name])} for name in bounds]
    for name, first in first_steps.items():
        row: dict = {"model": model.name, "attention": attention, "contender": name}
        row |= asdict(first) if isinstance(first, Failure) else first
        if name in measured:
            row |= asdict(measured[name])
        elif isinstance(first, dict):
            row["wrong"] = True
        rows.append(row)
    return rows


def step_bound(
    step: Callable[[], None], model: PreTrainedModel, batch: Mapping[str, Tensor]
) -> Callable[[], None]:
    """Return a function that computes the matmuls and attentions of one call of ``step``."""
    return step_matmuls(
        step,
        tokens=batch["labels"].numel(),
        supervised=int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()),
        vocab_size=model.config.vocab_size,
    )


def run_step(loss: Loss, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Compute loss and gradients of a batch, and clear the gradients."""
    try:
        loss(batch).backward()
    finally:
        model.zero_grad()


def first_step(loss: Loss, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the loss of a batch, and the norm of all gradients, which are cleared."""
    try:
        value = loss(batch)
        value.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return {"loss": value.item(), "gradient_norm": torch.stack(norms).norm().item()}
    finally:
        model.zero_grad()


def agrees(first: dict[str, float] | Failure, truth: dict[str, float]) -> bool:
    """Tell whether it has eager's loss and gradients, or those of the first contender that runs."""
    if isinstance(first, Failure):
        return False
    return all(
        abs(first[name] - truth[name]) <= most * abs(truth[name])
        for name, most in (
            ("loss", MAX_LOSS_DIFFERENCE),
            ("gradient_norm", MAX_NORM_DIFFERENCE),
        )
    )


def cases(options: argparse.Namespace) -> Cases:
    """Return the models whose name contains one of --model."""
    for name in options.contender or ():
        if "compile" in name and not options.compile:
            sys.exit(f"--contender {name!r} needs --compile")
        if "Liger" in name and not find_spec("liger_kernel"):
            sys.exit(f"--contender {name!r} needs liger-kernel")
    chosen = partial(some_contenders, options.contender)
    parts = options.model or [""]
    return {
        "steps": [
            partial(
                run_model,
                model,
                rounds=options.rounds,
                compiled=options.compile,
                of=partial(chosen, masked=model.rows != "whole"),
            )
            for model in MODELS
            if any(part in model.name for part in parts)
        ]
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="only the models whose name contains this, or another"
    )
    parser.add_argument(
        "--contender",
        action="append",
        choices=NAMES,
        help="only eager and the contender of this name, or another, where a model has it",
    )
    parser.add_argument(
        "--compile", action="store_true", help="eager and our layers compiled too: minutes"
    )


BENCHMARK = Benchmark(
    packages=("transformers", "peft", "bitsandbytes", "liger-kernel"),
    cases=cases,
    rounds=8,
    add_options=_add_options,
)
