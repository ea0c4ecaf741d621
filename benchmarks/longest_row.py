"""Measure the longest row that LoRA and QLoRA train in so much memory, beside peers.

    python -m benchmarks longest_row                      all models and contenders: hours
    python -m benchmarks longest_row --model QLoRA --contender Unsloth --gib 24 --limit 580
    python -m benchmarks longest_row --contender liger_patch --try 24:122880 --try 48:311296

Forward and backward of one row as in ``lora_step``: whole models, random weights, adapters of rank
16 in float32 under autocast to bf16, gradient checkpointing, no optimizer. Each contender has a
process of its own. Memory is limited by ``torch.cuda.set_per_process_memory_fraction``, so gaps of
the allocator count; a limit of more than the GPU has is all of it. Where two measured peaks expect
the limit to be met, a search begins for the longest multiple of 8192 tokens, or of 2 % of the row
where that is more. A row whose step has reserved no more than a limit fits it without another step.
A search that the time limit ends has a lower bound, with ">=".

Each step is printed as soon as it is done. The report is written after each contender, and when
SIGTERM or Ctrl-C ends the benchmark. --try asks whether one length fits, and searches for none.
--host-gib bounds the host memory that offloaded checkpoints may take, because a process that takes
too much is killed. Ours beyond it stay on the GPU, as with apply_patch(checkpoint_offload=GIB);
rows that would take Unsloth more are not tried.

Rows beyond --whole-attention attend within blocks of 8192 tokens, in every contender: whole
attention would take minutes a step there. Attention allocates as much as before, or less where it
takes several calls.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from transformers import LlamaConfig

from .attention_blocks import BLOCK
from .benchmark import Benchmark, Cases
from .lora_contenders import CONTENDERS as LORA_CONTENDERS
from .lora_contenders import Setting
from .lora_step import CHECKPOINTED, QWEN, run_process, save
from .measure import OUT_OF_MEMORY, Failure, attempt, release_memory
from .models import Model
from .names import FP8
from .row_search import LIMITS, TIMED, WHOLE, Limits, Search, width

POSITIONS = 2**21
CONTENDERS = tuple(name for name in LORA_CONTENDERS if name != FP8)
QWEN_CONFIG = copy.deepcopy(QWEN.config)
QWEN_CONFIG.max_position_embeddings = POSITIONS
# gaps of the allocator are part of the limit: no contender shall have more of them than need be
ALLOCATOR = "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'; "
MODELS = (
    Model(
        "Llama-3.1-8B",
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=POSITIONS,
        ),
        sequences=1,
    ),
    replace(QWEN, name="Qwen3-8B", config=QWEN_CONFIG, sequences=1),
)


def run_case(
    model: Model,
    settings: Sequence[Setting],
    contenders: Sequence[str],
    limits: Limits,
    *,
    device: str = "cuda",
) -> Iterator[dict]:
    """Save the model, let each contender of each setting search in a process of its own, and yield
    its rows: where a signal ends this process, first those of the contender at work.
    """
    start, to_run = time.monotonic(), len(settings) * len(contenders)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = str(place / "model")
        saved = attempt(lambda: save(model, folder, device))
        release_memory()
        for setting in settings:
            for contender in contenders:
                search = Search(contender, model.name, folder, setting, limits, device)
                print(f"{model.name}, {setting.name}: {contender} ...", flush=True)
                if isinstance(saved, Failure):
                    yield from summary(search, [], saved.failure)
                    continue
                left = limits.seconds_left(time.monotonic() - start, to_run)
                to_run -= 1
                yield from _searched(search, left, place)


def _searched(search: Search, seconds: float | None, place: Path) -> Iterator[dict]:
    """Run one process, which compiles its kernels into ``place``, and yield its rows."""
    before = f"{ALLOCATOR}from benchmarks import attention_blocks; "
    before += f"attention_blocks.install({search.limits.whole}); "
    before += "import unsloth; " if search.contender == "Unsloth" else ""
    steps, failure = [], "not reached: ended"
    try:
        request = json.dumps(asdict(search))
        failure = run_process("row_search", request, before, seconds, steps, place)
    finally:
        yield from summary(search, steps, failure)


def summary(search: Search, steps: list[dict], failure: str) -> Iterator[dict]:
    """Yield a row for each limit and each timed length, of the steps that a process has made.

    Args:
        failure: why there are no more steps, if some are missing.
    """
    limits = search.limits
    name = {
        "model": f"{search.model}, {search.setting.name}",
        "contender": search.contender,
        "whole_attention": limits.whole,
    }
    for tokens in limits.timed:
        row = next((each for each in steps if each.get("timed") == tokens), {"failure": failure})
        yield {
            **name,
            "timed": tokens,
            **{k: v for k, v in row.items() if k not in (*name, "timed")},
        }
    known = 0
    for gib in sorted(limits.gib):
        tried = {each["tokens"]: each.get("failure") for each in steps if each.get("gib") == gib}
        fitting = (each for each in steps if each.get("reserved_mib", math.inf) <= 1024 * gib)
        known = max([known, *(each.get("timed", each.get("tokens", 0)) for each in fitting)])
        if not tried and failure and not known:
            yield {**name, "gib": gib, "failure": failure}
            continue
        longest = max([known, *(tokens for tokens, why in tried.items() if why is None)])
        failed = {tokens: why for tokens, why in tried.items() if why is not None}
        shortest = min(failed, default=None)
        if limits.tries and shortest is not None and not longest:
            yield {**name, "gib": gib, "failure": f"{failed[shortest]} at {shortest:,} tokens"}
            continue
        known, row = longest, {**name, "gib": gib, "tokens": longest}
        if shortest is None or shortest - longest > width(shortest, limits.step):
            row["at_least"] = True
        elif failed[shortest] != OUT_OF_MEMORY:
            row["ends_with"] = failed[shortest]
        yield row


def cases(options: argparse.Namespace) -> Cases:
    """Return the models and settings whose name contains one of --model."""
    names = [each for each in CONTENDERS if each in (options.contender or CONTENDERS)]
    tries = tuple(map(gib_and_tokens, getattr(options, "try") or ()))
    limits = Limits(
        gib=list(dict.fromkeys(gib for gib, _ in tries)) or options.gib or LIMITS,
        timed=options.timed or (() if tries else TIMED),
        whole=options.whole_attention or WHOLE,
        rounds=options.rounds,
        seconds=options.limit,
        tries=tries,
        host_gib=options.host_gib,
        total=options.total,
    )
    chosen = {
        model.name: [
            setting
            for setting in CHECKPOINTED
            if any(part in f"{model.name}, {setting.name}" for part in options.model or [""])
        ]
        for model in MODELS
    }
    return {
        "longest_rows": [
            partial(run_case, model, chosen[model.name], names, limits)
            for model in MODELS
            if chosen[model.name]
        ]
    }


def gib_and_tokens(text: str) -> tuple[float, int]:
    """Read GIB:TOKENS.

    Raises:
        ValueError: it is not that, or no multiple of a block of attention.
    """
    gib, _, tokens = text.partition(":")
    if not tokens.isdecimal() or int(tokens) % BLOCK or not int(tokens):
        raise ValueError(f"--try must be GIB:TOKENS, tokens a multiple of {BLOCK}, got {text!r}")
    return float(gib), int(tokens)


def _checked(text: str) -> str:
    try:
        gib_and_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def positive_gib(text: str) -> float:
    gib = float(text)
    if not 0 < gib < math.inf:
        raise argparse.ArgumentTypeError(f"expected GiB > 0, got {text!r}")
    return gib


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="only the rows whose name contains this, or another"
    )
    parser.add_argument(
        "--contender",
        action="append",
        choices=CONTENDERS,
        help="only the contender of this name, or another",
    )
    parser.add_argument("--gib", type=positive_gib, action="append", help="of memory, or another")
    parser.add_argument(
        "--try",
        type=_checked,
        action="append",
        metavar="GIB:TOKENS",
        help="whether a row of TOKENS fits GIB of memory, or another; no search, no --timed",
    )
    parser.add_argument(
        "--host-gib",
        type=positive_gib,
        help="of host memory, for offloaded checkpoints (default: any)",
    )
    parser.add_argument("--timed", type=int, action="append", help="tokens of a timed row")
    parser.add_argument(
        "--whole-attention", type=int, help="tokens of the longest row that attends to all before"
    )
    parser.add_argument("--limit", type=float, help="seconds for each contender of a model")
    parser.add_argument(
        "--total",
        type=float,
        help="seconds for a model, without the start of this process: each contender gets its "
        "share of the rest",
    )


BENCHMARK = Benchmark(
    packages=("transformers", "peft", "bitsandbytes", "liger-kernel", "unsloth", "unsloth_zoo"),
    cases=cases,
    rounds=2,
    add_options=_add_options,
)
