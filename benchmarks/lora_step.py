"""Measure LoRA and QLoRA training steps of whole models beside peers, one process a contender.

    python -m benchmarks lora_step                        all rows
    python -m benchmarks lora_step --model Llama --contender Unsloth --layers 2

Forward and backward as Trainer(bf16=True) runs them: autocast to bf16 over a frozen base in bf16 or
nf4, and adapters in float32 (r=16 on every linear layer but the head). No optimizer; gradients are
cleared while the GPU still works. Qwen3.5 also trains every weight. All contenders load one folder
of random weights, get the same values of adapters and the same batch. A contender whose first loss
or gradient differs from eager's is wrong; that of a base in FP8, which rounds, is not compared.
Settings of one model run in turn in one process, whose kernels are compiled anew: so its first row
has the longest first step. Memory is the peak of the process, weights included.

Attention is PyTorch's SDPA. Unsloth chooses its own: SDPA too without flash-attn and xformers, but
flex attention for Gemma 3, whose sliding windows SDPA computes with a mask. Checkpointing is
Transformers' non-reentrant, and Unsloth's own, which compiles each layer.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import transformers
from transformers import Gemma3TextConfig

from .benchmark import Benchmark, Cases
from .lora_contenders import CONTENDERS, Request, Setting, is_measured
from .measure import Failure, attempt, release_memory
from .models import FULL_WIDTH, Model
from .names import FP8, LOWER_BOUND
from .sft_step import tiny_tokenizer
from .training_step import agrees

ROOT = Path(__file__).parents[1]
CHECKPOINTED = (
    Setting("LoRA + checkpointing", checkpointing=True),
    Setting("QLoRA + checkpointing", quantized=True, checkpointing=True),
)
DROPOUT = Setting("LoRA with dropout", dropout=0.05)
SETTINGS = (Setting("LoRA"), Setting("QLoRA", quantized=True), *CHECKPOINTED)


@dataclass(frozen=True)
class Case:
    """A model, its attention, and how it is trained: one row of the table for each."""

    model: Model
    settings: tuple[Setting, ...]
    attention: str = "sdpa"

    def named(self, parts: Sequence[str]) -> Case:
        """Return the case with those rows whose name contains one of ``parts``."""
        names = {each: f"{self.model.name}, {each.name}" for each in self.settings}
        found = [each for each, name in names.items() if any(part in name for part in parts)]
        return replace(self, settings=tuple(found))

    def cut(self, layers: int | None, tokens: int | None, sequences: int | None) -> Case:
        """Return the case with at most so many layers, and so many tokens and sequences a batch;
        None: as is.
        """
        model = self.model
        if layers is not None:
            model = replace(model, config=cut_config(model.config, layers))
        tokens = model.sequences * model.length if tokens is None else tokens
        sequences = model.sequences if sequences is None else sequences
        if not 0 < sequences <= tokens or tokens % sequences:
            raise ValueError(f"sequences={sequences}: expected a divisor of tokens={tokens}")
        return replace(self, model=model.resized(sequences, tokens // sequences))


def cut_config(config, layers: int):
    """Return a copy of a model's config with its first layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


LLAMA = FULL_WIDTH[0]
QWEN = replace(FULL_WIDTH[-1], name="Qwen3-8B, 4 x 2048", lora_rank=None)
QWEN_CUT = replace(QWEN, name="Qwen3-8B of 18 layers, 4 x 2048", config=cut_config(QWEN.config, 18))
GEMMA = Model(
    "Gemma-3-4B, 4 x 2048",  # the text model
    Gemma3TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=262208,
        sliding_window=1024,
    ),
    sequences=4,
)
HYBRIDS: tuple[Case, ...] = ()
if hasattr(transformers, "Qwen3_5TextConfig"):  # not in Transformers 5.0
    HYBRIDS = (
        Case(
            Model(
                "Qwen3.5-4B of 16 layers, 4 x 2048",
                transformers.Qwen3_5TextConfig(
                    hidden_size=2560,
                    intermediate_size=9216,
                    num_hidden_layers=16,
                    num_attention_heads=16,
                    num_key_value_heads=4,
                    tie_word_embeddings=True,
                ),
                sequences=4,
            ),
            (Setting("LoRA", linear=True), Setting("full training", rank=0)),
        ),
    )
CASES = (
    Case(LLAMA, (*SETTINGS, DROPOUT)),
    Case(QWEN_CUT, SETTINGS),
    Case(GEMMA, CHECKPOINTED),
    Case(QWEN, CHECKPOINTED),
    *HYBRIDS,
)


def run_case(
    case: Case,
    contenders: Sequence[str],
    *,
    rounds: int,
    device: str = "cuda",
    limit: float | None = None,
) -> Iterator[dict]:
    """Save the model, measure each contender in a process of its own, and compare with eager."""
    model, eagers = case.model, {}
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "model")
        is_held = all(each.held for each in case.settings)  # in models that are made at random
        saved = attempt(lambda: save(model, folder, "meta" if is_held else device))
        release_memory()
        for contender in contenders:
            settings = tuple(s for s in case.settings if is_measured(contender, s))
            if not settings:
                continue
            sizes = (model.sequences, model.length)
            how = (*sizes, settings, rounds, device, case.attention)
            request = Request(contender, model.name, folder, *how)
            if isinstance(saved, Failure):
                rows = _failed(request, saved.failure)
            else:
                rows = run_apart(request, limit=limit)
            if contender == "eager":
                eagers = {row["model"]: row for row in rows if "loss" in row}
            yield from judged(rows, eagers)


def run_apart(request: Request, *, limit: float | None = None) -> list[dict]:
    """Measure one contender in a new process, within ``limit`` seconds. A setting without a result
    gets the reason.
    """
    print(f"{request.model}: {request.contender} ...", flush=True)
    before = "import unsloth; " if request.contender == "Unsloth" else ""
    rows: list[dict] = []
    failure = run_process("lora_contenders", json.dumps(asdict(request)), before, limit, rows)
    missing = request.settings[len({row["model"] for row in rows}) :]
    return rows + _failed(replace(request, settings=missing), failure)


def run_process(
    module: str,
    request: str,
    before: str,
    limit: float | None,
    rows: list[dict],
    caches: Path | None = None,
) -> str:
    """Run ``main`` of a module of this folder in a new process, within ``limit`` seconds.

    Args:
        request: JSON, for the module.
        before: statements that run in front of its import.
        rows: those that it writes are added, also where a signal ends this process in the meantime.
        caches: folder of the kernels that such processes compile; None: no other process has any.

    Returns:
        why it wrote no others, if some are missing.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        place = Path(name)
        asked, results, errors = (place / each for each in ("request", "results", "errors"))
        asked.write_text(request, encoding="utf-8")
        code = (
            f"{before}from pathlib import Path; from benchmarks.{module} import main; "
            f"main(Path({str(asked)!r}), Path({str(results)!r}))"
        )
        done = None
        try:
            # no pipe: workers of a compiler could keep it open
            with errors.open("wb") as stderr, suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [sys.executable, "-c", code],
                    cwd=place,
                    env=_environment(caches or place),
                    stderr=stderr,
                    timeout=limit,
                )
        finally:
            said = errors.read_text(encoding="utf-8", errors="replace")
            print(said, file=sys.stderr, flush=True)
            lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
            rows += map(json.loads, lines)
    if done is None:
        return f"takes longer than {limit:.0f} s"
    *_, last = ["", *said.strip().splitlines()]
    return f"does not run: exit status {done.returncode}: {last}"


def judged(rows: Sequence[dict], eagers: Mapping[str, dict]) -> list[dict]:
    """Return one contender's rows, in front of each eager one its lower bound. Those unlike eager's
    of their setting are ``wrong``.
    """
    names = [row["model"] for row in rows]
    ordered = sorted(
        rows, key=lambda row: (names.index(row["model"]), row["contender"] != LOWER_BOUND)
    )
    for row in ordered:
        truth = eagers.get(row["model"])
        if truth is None or "loss" not in row or row["contender"] == FP8:
            continue
        if not agrees(row, truth):
            row["wrong"] = True
    return ordered


def _failed(request: Request, failure: str) -> list[dict]:
    return [
        {
            "model": f"{request.model}, {each.name}",
            "contender": request.contender,
            "failure": failure,
        }
        for each in request.settings
    ]


def save(model: Model, folder: str, device: str) -> None:
    if device == "meta":
        model.config.save_pretrained(folder)
    else:
        model.build(device).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def _environment(place: Path) -> dict[str, str]:
    """Return the environment of a process: no network, compiled kernels in this folder."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    return {
        **os.environ,
        **{name: str(place / name.lower()) for name in caches},
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(os.path.abspath(p) for p in paths if p)]),
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
    }


def cases(options: argparse.Namespace, of: Sequence[Case] = CASES) -> Cases:
    """Return the models with the rows whose name contains one of --model."""
    names = [
        name for name in CONTENDERS if name == "eager" or name in (options.contender or CONTENDERS)
    ]
    chosen = [case.named(options.model or [""]) for case in of]
    return {
        "lora_steps": [
            partial(
                run_case,
                case.cut(options.layers, options.tokens, options.sequences),
                names,
                rounds=options.rounds,
                limit=options.limit,
            )
            for case in chosen
            if case.settings
        ]
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="only the rows whose name contains this, or another"
    )
    parser.add_argument(
        "--contender",
        action="append",
        choices=CONTENDERS,
        help="only eager and the contender of this name, or another",
    )
    parser.add_argument("--layers", type=int, help="only the first layers of each model")
    parser.add_argument("--limit", type=float, help="seconds for each contender of a model")
    parser.add_argument("--tokens", type=int, help="tokens of a batch")
    parser.add_argument("--sequences", type=int, help="rows of a batch; its tokens stay as many")


BENCHMARK = Benchmark(
    packages=(
        *("transformers", "peft", "bitsandbytes", "liger-kernel", "unsloth", "unsloth_zoo"),
        *("flash-linear-attention", "causal-conv1d"),
    ),
    cases=cases,
    rounds=8,
    add_options=_add_options,
)
