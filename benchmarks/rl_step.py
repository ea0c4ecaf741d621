"""Measure updates of TRL's DPOTrainer and GRPOTrainer, with TRL's own head and with our flag.

    python -m benchmarks rl_step
    python -m benchmarks rl_step --model 'Llama-3.2-1B, GRPO' --contender TRL --contender Unsloth
    python -m benchmarks rl_step --model 'Llama-3.2-1B, GRPO of 32' --contender TRL --generation

Loss and metrics are TRL's; a DPO update computes its reference too, the model without adapters.
Rows are padded as TRL pads them: DPO's to the longest of the batch, GRPO's prompts on the left and
completions to the longest. Lengths are log-normal. "padded" is our flag with the padding left in
the batch, "prompts repeated" without it, but with the prompt of a pair or group before each of its
completions. "offloaded" keeps checkpoints in host memory. Tokens are those that the model's layers
compute in one pass. Measured and checked as ``training_step.py`` does it: forward and backward of
LoRA adapters on all layers, no optimizer, no generation. Unsloth's GRPOTrainer has a process of its
own: see ``rl_unsloth.py``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from liger_patch import apply_patch

from .benchmark import Benchmark
from .lora_step import run_process, save
from .measure import MIB, Failure, attempt, call_ms, release_memory
from .model_contenders import Loss, shared_copy
from .names import OFFLOADED, OURS, UNSLOTH
from .rl_unsloth import request_of
from .rl_updates import (
    UPDATES,
    Update,
    dpo_loss,
    first_of_completions,
    grpo_loss,
    make_trainer,
)
from .training_step import agrees, run_model

GENERATION = "generation by transformers"  # a row beside the contenders
BANDWIDTH = 4.8e12  # bytes a second: https://www.nvidia.com/en-us/data-center/h200
CONTENDERS: dict[str, dict[str, float]] = {  # to our constants that leave tokens out
    "TRL": {},
    "liger_patch, padded": {"LEAST_SAVED": 1.0},
    "liger_patch, prompts repeated": {"MOST_ROWS": 0},
    OURS: {},
    OFFLOADED: {},
}


def contenders(
    model: nn.Module,
    *,
    update: Update,
    tokens: dict[str, int],
    names: Collection[str] = tuple(CONTENDERS),
    **_: Any,
) -> dict[str, Callable[[], Loss]]:
    """Return functions that make the contenders, by name. All share the weights of ``model``.

    Args:
        tokens: gets what each contender's layers compute in one pass, by name.
    """
    return {
        name: partial(_loss, model, update, name, constants, tokens)
        for name, constants in CONTENDERS.items()
        if name in names and (update.checkpointing or name != OFFLOADED)
    }


def _loss(
    model: nn.Module,
    update: Update,
    name: str,
    constants: dict[str, float],
    tokens: dict[str, int],
) -> Loss:
    flags = {"use_liger_patch": name != "TRL", "bf16": False}  # the weights are in bf16 already
    source = "liger_patch.integrations.trl_trainers"
    own = shared_copy(model)
    if name == OFFLOADED:
        apply_patch(own, checkpoint_offload=True)
    trainer = make_trainer(own, update, source, **flags)
    compute = dpo_loss if update.trainer == "DPO" else grpo_loss

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        with _changed(constants), _counted(trainer.model, name, tokens):
            return compute(trainer, batch)

    return loss


@contextmanager
def _changed(constants: dict[str, float]) -> Iterator[None]:
    from liger_patch.layers import unpadded

    with ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(unpadded, name, value))
        yield


@contextmanager
def _counted(model: Any, name: str, tokens: dict[str, int]) -> Iterator[None]:
    """Count the tokens of a contender's first call: later ones are timed."""
    if name in tokens:
        yield
        return

    def count(_: nn.Module, arguments: tuple[Tensor]) -> None:
        tokens[name] = arguments[0].numel()

    count.__module__ = "torch.nn"  # a hook of a user's keeps the padding
    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def run_update(
    update: Update,
    *,
    rounds: int,
    names: Collection[str] | None = None,
    generation: bool = False,
    limit: float | None = None,
    device: str = "cuda",
) -> Iterator[dict]:
    """Yield the rows of the contenders; Unsloth's, and that of generation, for GRPO alone."""
    tokens: dict[str, int] = {}
    names = (*CONTENDERS, UNSLOTH) if names is None else names
    of = partial(contenders, update=update, tokens=tokens, names=names)
    rows = run_model(update, rounds=rounds, device=device, of=of) if {*names} - {UNSLOTH} else []
    for row in rows:
        count = tokens.get(row["contender"])
        yield row if count is None else {**row, "tokens": count}
    if update.trainer == "DPO":
        return
    if UNSLOTH in names:
        truth = next((row for row in rows if "loss" in row), None)
        row = run_unsloth(update, rounds=rounds, limit=limit, device=device)
        if truth is not None and "loss" in row and not agrees(row, truth):
            row["wrong"] = True
        yield row
    if generation:
        generated = attempt(lambda: _generation(update, device))
        release_memory()
        key = {"model": update.name, "contender": GENERATION}
        if isinstance(generated, Failure):
            yield {**key, "failure": generated.failure}
            return
        yield {**key, **generated}
        _print_iteration(update, generated, rows)


def run_unsloth(update: Update, *, rounds: int, limit: float | None, device: str) -> dict:
    """Return the row of Unsloth's GRPOTrainer, of a process of its own with ``limit`` seconds."""
    key = {"model": update.name, "contender": UNSLOTH}
    print(f"{update.name}: {UNSLOTH} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        base = replace(update, lora_rank=None, checkpointing=False)
        saved = attempt(lambda: save(base, folder, device))
        release_memory()
        if isinstance(saved, Failure):
            return {**key, "failure": saved.failure}
        request = request_of(update, folder, rounds, device)
        rows: list[dict] = []
        failure = run_process("rl_unsloth", request, "import unsloth; ", limit, rows)
    return {**key, **(rows[0] if rows else {"failure": failure})}


def _generation(update: Update, device: str) -> dict[str, float]:
    """Measure one generation of the batch: it lasts as long as its longest completion."""
    model, batch = update.build(device).eval(), update.batch(device)
    left = first_of_completions(batch)
    prompts = {name: batch[name][:, :left] for name in ("input_ids", "attention_mask")}
    steps = batch["input_ids"].shape[1] - left

    def generate(count: int) -> None:
        how = {"do_sample": True, "min_new_tokens": count, "max_new_tokens": count}
        with torch.no_grad():
            model.generate(**prompts, **how, pad_token_id=0)

    generate(2)
    allocated, most = 0, 0
    if device == "cuda":
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    ms = call_ms(lambda: generate(steps), device)
    if device == "cuda":
        most = torch.cuda.max_memory_allocated()
    embeddings = model.get_input_embeddings().weight
    is_read = model.get_output_embeddings().weight is embeddings
    weights = [p for p in model.parameters() if is_read or p is not embeddings]
    return {
        "ms": ms,
        "host_ms": ms,
        "peak_mib": (most - allocated) / MIB,
        "steps": steps,
        "read_bytes": sum(p.numel() * p.element_size() for p in weights),  # by each step, at least
    }


def _print_iteration(update: Update, generated: Mapping[str, float], rows: list[dict]) -> None:
    steps, seconds = generated["steps"], generated["ms"] / 1000
    least = steps * generated["read_bytes"] / BANDWIDTH
    print(f"{update.name}: {steps} steps of generation in {seconds:.1f} s, in {least:.1f} at best")
    for row in rows:
        if "ms" in row:
            own = row["ms"] / 1000
            share, most = own / (own + seconds), own / (own + least)
            print(
                f"  {row['contender']}: {own:.2f} s of update are {share:.0%} of the iteration, "
                f"{most:.0%} at best"
            )


def _cases(options: argparse.Namespace) -> Any:
    chosen = [each for each in UPDATES if any(part in each.name for part in options.model or [""])]
    how: dict[str, Any] = {"names": options.contender, "rounds": options.rounds}
    how |= {"generation": options.generation, "limit": options.limit}
    return {"rl_steps": [partial(run_update, each, **how) for each in chosen]}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="only the rows whose name contains this, or another"
    )
    parser.add_argument(
        "--contender",
        action="append",
        choices=(*CONTENDERS, UNSLOTH),
        help="only the contender of this name, or another",
    )
    parser.add_argument(
        "--generation", action="store_true", help="GRPO's generation by Transformers too"
    )
    parser.add_argument("--limit", type=float, help="seconds for Unsloth's process of a row")


BENCHMARK = Benchmark(
    packages=("transformers", "trl", "peft", "unsloth", "unsloth_zoo"),
    cases=_cases,
    rounds=8,
    add_options=_add_options,
)
