"""Check the gradients of a row of a million tokens, and of every block of a shorter one.

    python -m benchmarks long_row_check                    1,007,616 tokens: 250 GiB of host memory
    python -m benchmarks long_row_check --tokens 409600    100 GiB
    python -m benchmarks long_row_check --device cpu       tiny

One row through a model of Llama-3.1-8B's shape: random weights, QLoRA (nf4, r=16), gradient
checkpointing with offloaded checkpoints. As in ``longest_row``, it attends within
blocks of 8192 tokens. So an unpatched model (eager) computes the same block by block, given each
block's positions, the label behind it, and the number of labels in the row.

The truth is the eager model in float32, without autocast: adapters as they are, 4-bit weights as
they are dequantized. Errors are norms of a difference over that of the truth. A gradient may have
twice eager's, a loss one eps of bf16 more. Compared are the gradients of the embeddings' output in
the first, the middle and the last block; of --all-blocks tokens, those of all blocks, the loss, and
the adapters' gradients. Exits with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from liger_patch import apply_patch, patch_status, revert_patch

from . import attention_blocks
from .benchmark import Benchmark, Cases
from .heads import IGNORE_INDEX
from .longest_row import MODELS, positive_gib
from .lora_contenders import LORA, autocast_loss, fill_adapters
from .measure import MIB, relative_error, release_memory
from .models import Model
from .names import OFFLOADED

EPS = torch.finfo(torch.bfloat16).eps
MOST = 2  # times eager's error
MODEL = replace(MODELS[0], quantized=True)


@dataclass(frozen=True)
class Check:
    """What is checked.

    Attributes:
        model: of the row, with its weights in 4 bits.
        tokens: of the long row, of which three blocks are compared.
        all_blocks: tokens of the row of which all blocks are compared.
        block: tokens that attend to each other.
        host_gib: of host memory for these inputs; None for what is available.
    """

    model: Model = MODEL
    tokens: int = 1_007_616
    all_blocks: int = 65_536
    block: int = attention_blocks.BLOCK
    device: str = "cuda"
    host_gib: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("tokens", 3), ("all_blocks", 1)):
            value = getattr(self, name)
            if value % self.block or value < least * self.block:
                raise ValueError(
                    f"{name} must be a multiple of {self.block}, at least {least * self.block}, "
                    f"got {value}"
                )

    def batch(self, tokens: int) -> tuple[dict[str, Tensor], int]:
        """Return a row, and how many of its labels are predicted."""
        batch = replace(self.model, sequences=1, length=tokens).batch(self.device)
        return batch, int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())

    def compared(self) -> list[int]:
        """Return where the compared blocks of the long row start."""
        blocks = self.tokens // self.block
        return [self.block * each for each in (0, blocks // 2, blocks - 1)]

    def every(self) -> list[int]:
        """Return where the blocks of the shorter row start."""
        return list(range(0, self.all_blocks, self.block))


TINY = Check(
    Model(
        "tiny",
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=96,
            max_position_embeddings=512,
        ),
        sequences=1,
        quantized=True,
    ),
    tokens=160,
    all_blocks=64,
    block=16,
    device="cpu",
)


@dataclass
class Found:
    """What one model computes.

    Attributes:
        loss: of the shorter row.
        adapters: their gradients there, by name.
        every, compared: gradients of the embeddings' output, of the shorter and the long row.
    """

    loss: float
    adapters: dict[str, Tensor]
    every: list[Tensor]
    compared: list[Tensor]


def run_check(check: Check) -> list[dict]:
    """Train on both rows, and compare with their blocks: a row for each result."""
    attention_blocks.install(check.block, check.block)
    ours, rows = _patched(check)
    eager, truth = _by_blocks(check)
    name = {"model": check.model.name, "contender": OFFLOADED}
    return [{**name, **row} for row in [*rows, *compare(check, ours, eager, truth)]]


def compare(check: Check, ours: Found, eager: Found, truth: Found) -> Iterator[dict]:
    """Yield errors of both, and whether ours are small enough."""
    error, eager_error = (abs(each.loss / truth.loss - 1) for each in (ours, eager))
    yield _row(check.all_blocks, "loss", error, eager_error, EPS)

    def errors(gradients: Sequence[Sequence[Tensor]]) -> list[float]:
        mine, its, true = (torch.cat([g.flatten() for g in each]) for each in gradients)
        return [relative_error(mine, true), relative_error(its, true)]

    by_name = {
        name: errors([[each.adapters[name]] for each in (ours, eager, truth)])
        for name in truth.adapters
    }
    all_adapters = errors([list(each.adapters.values()) for each in (ours, eager, truth)])
    yield _row(check.all_blocks, "gradients of the adapters", *all_adapters)
    worst = max(by_name, key=lambda name: by_name[name][0] / by_name[name][1])
    yield _row(check.all_blocks, f"worst of these, {worst}", *by_name[worst])
    every = errors([each.every for each in (ours, eager, truth)])
    yield _row(check.all_blocks, "gradient of the embeddings", *every)
    for i, start in enumerate(check.compared()):
        of_block = errors([[each.compared[i]] for each in (ours, eager, truth)])
        what = f"gradient of the embeddings, {start:,} to {start + check.block - 1:,}"
        yield _row(check.tokens, what, *of_block)


def _row(tokens: int, what: str, error: float, eager_error: float, more: float = 0.0) -> dict:
    holds = error <= MOST * eager_error + more  # False for nan
    found = {"error": error, "eager_error": eager_error, "holds": holds}
    return {"tokens": tokens, "what": what, **found}


def _patched(check: Check) -> tuple[Found, list[dict]]:
    """Train the patched model on both rows; a row each says loss, time and memory."""
    model, rows = _built(check), []
    if check.device == "cuda":
        offload = check.host_gib or True
        apply_patch(model, checkpoint_offload=offload)
    else:
        apply_patch(model)
    results = []
    for tokens, starts in (
        (check.all_blocks, check.every()),
        (check.tokens, check.compared()),
    ):
        batch, count = check.batch(tokens)
        release_memory()
        if check.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with _embedding_gradients(model, starts, check.block) as gradients:
            loss = autocast_loss(model, {**batch, "num_items_in_batch": count})
            loss.backward()
        value, seconds = loss.item(), time.perf_counter() - start
        status = patch_status(model)
        if not status.fused:
            raise RuntimeError(f"the row of {tokens} tokens is not fused: {status}")
        finite = math.isfinite(value) and all(g.isfinite().all() for _, g in _gradients(model))
        row: dict = {"tokens": tokens, "what": "loss and gradients are finite", "loss": value}
        row |= {"seconds": seconds, "holds": bool(finite)}
        if check.device == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / MIB
            row["offloaded"] = dict(status.rows).get("checkpoint offload", "")
        print(row, flush=True)
        rows.append(row)
        results.append((value, {name: g.cpu() for name, g in _gradients(model)}, gradients))
        del loss, batch
        model.zero_grad()
    revert_patch(model)  # frees the host memory
    (loss_of_all, adapters, every), (_, _, compared) = results
    return Found(loss_of_all, adapters, every, compared), rows


def _by_blocks(check: Check) -> tuple[Found, Found]:
    """Return what an unpatched model computes, and what it does in float32."""
    release_memory()
    model, results = _built(check), []
    for is_truth in (False, True):
        if is_truth:
            _to_float32(model)
        release_memory()
        loss, every = _blocks(model, check, check.all_blocks, check.every(), is_truth)
        adapters = {name: g.cpu() for name, g in _gradients(model)}
        model.zero_grad()
        _, compared = _blocks(model, check, check.tokens, check.compared(), is_truth)
        model.zero_grad()
        results.append(Found(loss, adapters, every, compared))
        print("float32" if is_truth else "eager", f"loss {loss}", flush=True)
    eager, truth = results
    return eager, truth


def _blocks(
    model: Any, check: Check, tokens: int, starts: Sequence[int], is_truth: bool
) -> tuple[float, list[Tensor]]:
    """Add to the gradients those of some blocks of a row; return their loss, and the gradients of
    the embeddings' output.
    """
    batch, count = check.batch(tokens)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)  # each behind its token
    total, found = 0.0, []
    for start in starts:
        part = slice(start, start + check.block)
        positions = torch.arange(part.start, part.stop, device=check.device)[None]
        autocast = torch.autocast(check.device, torch.bfloat16)
        with (
            _embedding_gradients(model, [0], check.block) as gradients,
            nullcontext() if is_truth else autocast,
        ):
            input_ids = batch["input_ids"][:, part]
            logits = model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
            loss = F.cross_entropy(logits[0].float(), labels[0, part], reduction="sum") / count
        loss.backward()
        total += loss.item()
        found += gradients
        del logits, loss
    return total, found


def _built(check: Check) -> Any:
    """Return PEFT's model: the same weights and adapters at each call."""
    model = check.model.build(check.device)
    model: Any = get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fill_adapters(model)
    return model.train()


def _to_float32(model: Any) -> None:
    """Hold every weight in float32, with the values of the 16-bit ones that products read."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear4bit):
                weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                weight = weight.to(torch.bfloat16).float()
                plain.weight = nn.Parameter(weight, requires_grad=False)
                setattr(parent, name, plain)
    model.float()


@contextmanager
def _embedding_gradients(model: Any, starts: Sequence[int], block: int) -> Iterator[list[Tensor]]:
    """Fill a list with the gradients of the embeddings' output in the blocks that start there."""
    found: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        found.extend(gradient[0, start : start + block].float().cpu() for start in starts)

    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        y = y + torch.zeros_like(y[0, 0], requires_grad=True)  # the embeddings are frozen
        y.register_hook(keep)
        return y

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


def _gradients(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]


def cases(options: argparse.Namespace) -> Cases:
    """Return the one check that the options describe."""
    check = TINY if options.device == "cpu" else Check()
    given = {"tokens": options.tokens, "all_blocks": options.all_blocks}
    given["host_gib"] = options.host_gib
    check = replace(check, **{name: value for name, value in given.items() if value is not None})
    return {"long_row_check": [partial(run_check, check)]}


def finish(report: dict) -> int:
    """Return 1 where a result is wrong."""
    return 0 if all(row["holds"] for row in report["long_row_check"]) else 1


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, help="of the long row, a multiple of 8192 (default: 1007616)")
    add("--all-blocks", type=int, help="tokens of the row compared in full (default: 65536)")
    add("--host-gib", type=positive_gib, metavar="GIB",
        help="of host memory for these inputs, on a GPU (default: what is available)")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, blocks of 16 tokens")


BENCHMARK = Benchmark(
    packages=("transformers", "peft", "bitsandbytes"),
    cases=cases,
    add_options=_add_options,
    finish=finish,
)
