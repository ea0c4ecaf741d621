"""Steps of one model: each contender's first is compared with eager's, then all are timed.

The contenders share one set of weights and one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch
from attempts import Failure, attempt, release_memory
from heads import IGNORE_INDEX
from measure import measure
from model_contenders import Loss, contenders
from models import Model
from report import FLOOR
from step_products import step_products
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    """Compare, then time every contender on one model, and the products of eager's step alone.

    ``of``: what makes the contenders of the model.
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
    attention = built.config._attn_implementation  # the model's default, which differs by version
    losses: dict[str, Loss] = {}
    first_steps: dict[str, dict[str, float] | Failure] = {}
    for name, make in of(built, compiled=compiled).items():
        loss = attempt(make)
        if isinstance(loss, Failure):
            first_steps[name] = loss
        else:
            losses[name] = loss
            first_steps[name] = attempt(lambda loss=loss: _first_step(loss, built, batch))
    truth = next((first for first in first_steps.values() if isinstance(first, dict)), {})
    right = [name for name, first in first_steps.items() if _agrees(first, truth)]
    steps = {name: partial(_step, losses[name], built, batch) for name in right}
    rows: list[dict] = []
    floors: dict[str, Callable[[], None]] = {}
    if "eager" in steps and not model.quantised:  # packed weights have no bare products
        floor = attempt(lambda: _floor(steps["eager"], built, batch))
        if isinstance(floor, Failure):
            rows.append({"model": model.name, "contender": FLOOR, **asdict(floor)})
        else:
            floors[FLOOR] = floor
    measured = measure({**floors, **steps}, rounds=rounds, device=device)
    rows += [{"model": model.name, "contender": name, **asdict(measured[name])} for name in floors]
    for name, first in first_steps.items():
        row: dict = {"model": model.name, "attention": attention, "contender": name}
        row |= asdict(first) if isinstance(first, Failure) else first
        if name in measured:
            row |= asdict(measured[name])
        elif isinstance(first, dict):
            row["wrong"] = True
        rows.append(row)
    return rows


def _floor(
    step: Callable[[], None], model: PreTrainedModel, batch: Mapping[str, Tensor]
) -> Callable[[], None]:
    return step_products(
        step,
        tokens=batch["labels"].numel(),
        supervised=int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()),
        vocab_size=model.config.vocab_size,
    )


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
