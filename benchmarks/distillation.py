"""Measure the distillation loss of two heads, forward and backward, beside peers and a lower bound.

    python -m benchmarks distillation

The student's head trains; the bound is the four matrix products alone. All contenders run in this
one process, interleaved; one that is not installed or fails says why. Before anything is timed,
each one's gradients are compared with float64 on a part of the tokens: one that is wrong is not
timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear

from liger_patch import linear_distillation

from .benchmark import Benchmark, Rows
from .heads import Head, batch
from .measure import (
    MIB,
    Failure,
    attempt,
    checked_rows,
    is_right,
    measure,
    relative_error,
    release_memory,
)
from .names import EAGER, LOWER_BOUND, OURS, UNSLOTH

TOKENS = 1000  # that are compared with float64

# student's hidden states and weight, teacher's hidden states and weight -> ()
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Two heads and a divergence.

    Attributes:
        head: the student's.
        teacher_hidden: hidden size of the teacher.
        beta: of the generalized JSD; 0 is forward KL.
    """

    head: Head
    teacher_hidden: int
    beta: float

    @property
    def name(self) -> str:
        return f"{self.head.name}, {f'JSD {self.beta:g}' if self.beta else 'forward KL'}"


HEADS = (  # and the teacher's hidden size
    (Head("Llama-3.2-1B from 8B", 2048, 128256, 8192), 4096),
    (Head("Qwen3-0.6B from 8B", 1024, 151936, 16384), 4096),
    (Head("Llama-3.1-8B from 70B", 4096, 128256, 8192), 8192),
)
CASES = tuple(Case(*head, beta) for head in HEADS for beta in (0.5, 0.0))


def contenders(case: Case, *, compiled: bool = True) -> dict[str, Loss]:
    """Return losses by name, eager first."""
    losses = {EAGER: eager(case)}
    if compiled:
        torch.compiler.reset()  # of each case a graph of its own, with static shapes
        losses["torch.compile"] = torch.compile(eager(case), dynamic=False)
    peers = {"Liger-Kernel": _liger(case), "TRL": _trl(case), UNSLOTH: _unsloth(case)}
    return {**losses, **peers, OURS: _ours(case)}


def eager(case: Case) -> Loss:
    """Return what trainers do: both logits, then the divergence in at least float32."""

    def loss(x: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
        logits = linear(x, weight), linear(teacher, teacher_weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        s, t = (each.to(wide).log_softmax(-1) for each in logits)
        kl = partial(kl_div, reduction="batchmean", log_target=True)
        if not case.beta:
            return kl(s, t)
        shares = torch.tensor([case.beta, 1 - case.beta], dtype=wide, device=x.device).log()
        m = torch.logaddexp(t + shares[0], s + shares[1])
        return case.beta * kl(m, t) + (1 - case.beta) * kl(m, s)

    return loss


def _ours(case: Case) -> Loss:
    return partial(linear_distillation, divergence="jsd", beta=case.beta)


def _liger(case: Case) -> Loss:
    def loss(x: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
        module = import_module("liger_kernel.transformers").LigerFusedLinearJSD(jsd_beta=case.beta)
        return module(x, weight, teacher, teacher_weight, None)

    return loss


def _trl(case: Case) -> Loss:
    """Return what DistillationTrainer computes, the student's entropies included."""

    def loss(x: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
        function = import_module("trl.trainer.distillation_trainer")._chunked_divergence_loss
        given = x[None], teacher[None], weight, teacher_weight, x.new_ones(1, len(x))
        return function(*given, case.beta)[0]

    return loss


def _unsloth(case: Case) -> Loss:
    """Return the loss of its GKD, without ``import unsloth``: see ``head_contenders``."""

    def loss(*inputs: Tensor) -> Tensor:
        os.environ.setdefault("UNSLOTH_IS_PRESENT", "1")
        function = import_module("unsloth_zoo.fused_losses.fused_linear").fused_linear_jsd
        return function(*inputs, beta=case.beta)

    return loss


def heads(case: Case, *, device: torch.device | str, seed: int = 0) -> Batch:
    """Return (N, H), (V, H), (N, H2) and (V, H2) in bf16; both heads know about the labels."""
    x, weight, labels = batch(case.head, device=device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    normal = {"device": device, "generator": generator, "dtype": torch.float32}
    sizes = case.head.vocab_size, case.teacher_hidden
    teacher_weight = torch.randn(*sizes, **normal).mul_(case.teacher_hidden**-0.5)
    confidence = case.head.peak * torch.rand(case.head.tokens, 1, **normal)
    teacher = torch.randn(case.head.tokens, case.teacher_hidden, **normal)
    teacher += confidence * teacher_weight[labels]
    return x, weight, teacher.bfloat16(), teacher_weight.bfloat16()


def step(loss: Loss, x: Tensor, weight: Tensor, *teacher: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward; return the gradients."""
    return torch.autograd.grad(loss(x, weight, *teacher), (x, weight))


def run_case(
    case: Case,
    losses: Mapping[str, Loss],
    *,
    rounds: int,
    device: torch.device | str = "cuda",
) -> Rows:
    """Check, then time every contender on one case; the lower bound is the first row."""
    rows = attempt(lambda: _rows(case, losses, rounds, device))
    release_memory()
    if isinstance(rows, Failure):
        return [{**_key(case), "contender": LOWER_BOUND, **asdict(rows)}]
    return rows


def _rows(case: Case, losses: Mapping[str, Loss], rounds: int, device: torch.device | str) -> Rows:
    checks = _gradient_errors(case, losses, device)
    right = {n: loss for n, loss in losses.items() if is_right(checks[n], checks[EAGER])}
    inputs = heads(case, device=device)
    bound = _matmuls(*inputs)
    steps = {name: partial(step, loss, *inputs) for name, loss in right.items()}
    measured = measure({LOWER_BOUND: bound, **steps}, before=bound, rounds=rounds, device=device)
    return checked_rows(_key(case), checks, measured)


def _gradient_errors(
    case: Case, losses: Mapping[str, Loss], device: torch.device | str
) -> dict[str, list[float] | Failure]:
    """Return the relative errors, by norm, of each contender's gradients on a few tokens."""
    tokens = min(TOKENS, case.head.tokens)
    inputs = heads(replace(case, head=replace(case.head, tokens=tokens)), device=device, seed=1)
    exact = (each.detach().double().requires_grad_(each.requires_grad) for each in inputs)
    truth = step(eager(case), *exact)

    def errors(loss: Loss) -> list[float]:
        found = step(loss, *inputs)
        return [relative_error(*pair) for pair in zip(found, truth, strict=True)]

    return {name: attempt(partial(errors, loss)) for name, loss in losses.items()}


def _matmuls(
    x: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor
) -> Callable[[], None]:
    """Return a function that computes the four matrix products, into allocated memory."""
    x, weight = x.detach(), weight.detach()
    logits = x.new_empty(len(x), len(weight))
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def matmuls() -> None:
        torch.mm(teacher, teacher_weight.t(), out=logits)
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dweight)

    return matmuls


def _key(case: Case) -> dict:
    head = case.head
    gradients = (head.tokens + head.vocab_size) * head.hidden_size * 2 / MIB
    sizes = {"tokens": head.tokens, "gradients_mib": round(gradients)}
    return {"case": case.name, **sizes}


def _cases(options: argparse.Namespace) -> dict:
    def measured(case: Case) -> Rows:
        losses = contenders(case, compiled=not options.no_compile)
        return run_case(case, losses, rounds=options.rounds)

    wanted = options.model or [""]
    chosen = [case for case in CASES if any(part in case.name for part in wanted)]
    return {"distillation": [partial(measured, case) for case in chosen]}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="only the cases whose name contains this, or another"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


BENCHMARK = Benchmark(
    packages=("liger-kernel", "trl", "unsloth_zoo"),
    cases=_cases,
    rounds=10,
    add_options=_add_options,
)
