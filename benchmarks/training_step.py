"""Forward and backward of whole models: time and memory of our loss beside peers.

    python benchmarks/training_step.py                       all models
    python benchmarks/training_step.py --model Gemma --compile

The contenders of a model share one set of weights and one batch, so all of them are interleaved in
this one process, whatever the model's size; models run one after the other. One step of each is
compared with eager's first: a contender whose loss or gradient differs is not timed. Gradients are
made anew in every step and count as its memory, weights do not. No optimizer, no checkpointing.
Writes JSON after every model, then a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from attempts import Failure, attempt, release_memory
from drawing import draw_where_possible
from measure import measure
from model_contenders import Loss, contenders
from models import MODELS, Model
from provenance import command_line, provenance
from report import terminal_steps_table
from torch import Tensor, nn

PACKAGES = ("transformers", "peft", "bitsandbytes", "liger-kernel")
MAX_LOSS_DIFFERENCE = 0.02  # of eager's loss
MAX_NORM_DIFFERENCE = 0.05  # of eager's norm of all gradients


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "training_step.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "steps": []}
    for model in MODELS:
        if arguments.model is None or arguments.model in model.name:
            rows = run_model(model, rounds=arguments.rounds, compiled=arguments.compile)
            print(terminal_steps_table(rows), flush=True)
            report["steps"] += rows
            path.write_text(json.dumps(report, indent=1) + "\n")
    draw_where_possible(report, path)


def run_model(
    model: Model, *, rounds: int, compiled: bool = False, device: torch.device | str = "cuda"
) -> list[dict]:
    """Compare, then time every contender on one model."""
    rows = attempt(lambda: _rows(model, rounds, compiled, device))
    if compiled:
        torch.compiler.reset()  # it holds on to the model
    release_memory()
    if isinstance(rows, Failure):  # of building the model
        return [{"model": model.name, "contender": "eager", **asdict(rows)}]
    return rows


def _rows(model: Model, rounds: int, compiled: bool, device: torch.device | str) -> list[dict]:
    built, batch = model.build(device), model.batch(device)
    attention = built.config._attn_implementation  # the model's default, which differs by version
    losses: dict[str, Loss] = {}
    first_steps: dict[str, dict[str, float] | Failure] = {}
    for name, make in contenders(built, compiled=compiled).items():
        loss = attempt(make)
        if isinstance(loss, Failure):
            first_steps[name] = loss
        else:
            losses[name] = loss
            first_steps[name] = attempt(lambda loss=loss: _first_step(loss, built, batch))
    truth = next((first for first in first_steps.values() if isinstance(first, dict)), {})
    right = [name for name, first in first_steps.items() if _agrees(first, truth)]
    measured = measure(
        {name: partial(_step, losses[name], built, batch) for name in right},
        rounds=rounds,
        device=device,
    )
    rows = []
    for name, first in first_steps.items():
        row: dict = {"model": model.name, "attention": attention, "contender": name}
        row |= asdict(first) if isinstance(first, Failure) else first
        if name in measured:
            row |= asdict(measured[name])
        elif isinstance(first, dict):
            row["wrong"] = True
        rows.append(row)
    return rows


def _step(loss: Loss, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    try:
        loss(batch).backward()
    finally:
        model.zero_grad()


def _first_step(loss: Loss, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    try:
        value = loss(batch)
        value.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return {"loss": value.item(), "gradient_norm": torch.stack(norms).norm().item()}
    finally:
        model.zero_grad()


def _agrees(first: dict[str, float] | Failure, truth: dict[str, float]) -> bool:
    """With eager's step, or that of the first contender that runs."""
    if isinstance(first, Failure):
        return False
    return all(
        abs(first[name] - truth[name]) <= most * abs(truth[name])
        for name, most in (
            ("loss", MAX_LOSS_DIFFERENCE),
            ("gradient_norm", MAX_NORM_DIFFERENCE),
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="only the models whose name contains this")
    parser.add_argument(
        "--rounds", type=int, default=8, help="timed steps of each contender (default 8)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile of eager too: minutes"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of JSON and picture"
    )
    return parser


if __name__ == "__main__":
    main()
