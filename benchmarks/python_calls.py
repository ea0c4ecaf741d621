"""Count the Python calls, the files and the changes of file of a training step, on a CPU.

python -m benchmarks.python_calls

A step is a forward and a backward pass of a tiny Llama, after two others. Only functions of
liger_patch count: calls, the files that they stand in, how often a call goes to another file than
the one before, and the same for folders. `a layer` is the difference of two more decoder layers,
halved. `time / eager` is the median time of a step over that of the model without the patch.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import liger_patch
from liger_patch.layers import checks

from .models import quantise

PACKAGE = str(Path(liger_patch.__file__).parent)
LAYERS = 2  # of the smaller model
TIMED = 20  # steps
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = ("layers off", "layers on", "LoRA", "QLoRA, checkpointing")


class Counts(NamedTuple):
    """What one step calls in liger_patch."""

    calls: int
    files: int
    changes_of_file: int
    changes_of_folder: int
    functions: Counter[str]


def main() -> None:
    """Print a row for each kind of step."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    words = "print the N functions that a layer calls most"
    parser.add_argument("most", nargs="?", type=int, default=0, metavar="N", help=words)
    most = parser.parse_args().most
    torch.set_num_threads(1)
    checks.DEVICES = (*checks.DEVICES, "cpu")  # layers run as on a GPU, not the model's own code
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"A tiny Llama of {LAYERS} layers on one CPU thread, whose time is no GPU's:\n")
    print("| step | calls | a layer | files | changes of file | of folder | time / eager |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        step = _step(case, LAYERS)
        counts, more = count(step), count(_step(case, LAYERS + 2))
        ratio = _milliseconds(step) / _milliseconds(_step(case, LAYERS, patched=False))
        print(
            f"| {case} | {counts.calls} | {(more.calls - counts.calls) / 2:g} | {counts.files} | "
            f"{counts.changes_of_file} | {counts.changes_of_folder} | {ratio:.2f} |"
        )
        for name, number in (more.functions - counts.functions).most_common(most):
            print(f"{number / 2:8g} {name}")


def count(step: Callable[[], None]) -> Counts:
    """Count the calls of a step into functions of liger_patch."""
    files: list[str] = []
    functions: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            files.append(code.co_filename)
            functions[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_name}"] += 1

    sys.setprofile(note)  # a backward pass on a CPU runs in the same thread
    try:
        step()
    finally:
        sys.setprofile(None)
    return Counts(
        len(files),
        len(set(files)),
        sum(a != b for a, b in pairwise(files)),
        sum(Path(a).parent != Path(b).parent for a, b in pairwise(files)),
        functions,
    )


def _step(case: str, layers: int, *, patched: bool = True) -> Callable[[], None]:
    """Return a step of a tiny model that has run twice."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    if "LoRA" in case:
        model = _with_adapters(model, packed=case.startswith("Q"))
    if "checkpointing" in case:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if patched:
        liger_patch.apply_patch(model, layers=case != "layers off")
    model.train()
    tokens = torch.randint(512, (2, 64))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled="LoRA" in case):
            model(input_ids=tokens, labels=tokens).loss.backward()

    step()
    step()
    return step


def _with_adapters(model: Any, *, packed: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    if packed:
        quantise(model)
    return get_peft_model(model, LoraConfig(r=8, target_modules=PROJECTIONS, lora_dropout=0.0))


def _milliseconds(step: Callable[[], None]) -> float:
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


if __name__ == "__main__":
    main()
