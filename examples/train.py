"""Trains a small model from scratch on real text, unpatched and patched, and compares the two.

The text is the source of Python's standard library, so nothing is downloaded. Each training has a
process, and so a peak memory, of its own: unpatched and patched, which take a step each in turn so
that their speeds compare, then a control (unpatched, from weights that differ by rounding only)
which shows how far apart two right trainings may drift. With several GPUs, they run one after the
other. Writes comparison.png and comparison.json; exits with 1 if
patched and unpatched differ by more than the precision explains. Runs on the CPU in about a minute.

    python examples/train.py
    python examples/train.py --model-type gemma2 --vocab-size 32768 --batch-size 16 --steps 200
    accelerate launch --config_file examples/fsdp2.yaml examples/train.py
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from comparison import differences, picture, table, verdict
from corpus import SMALLEST_VOCABULARY, Corpus, build_corpus
from small_model import HEAD_DIM, text_model_types
from training import UNTIMED_STEPS, Run, Settings, take_turns, train

import liger_patch


def main() -> int:
    settings, output = parse_arguments()
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    is_first = int(os.environ.get("RANK", "0")) == 0
    if settings.device == "cuda" and is_alone:
        # One GPU: Trainer would split each batch over all that it sees.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]

    corpus = build_corpus(settings.vocab_size, settings.length)
    print(
        f"Text: Python {platform.python_version()}'s standard library, {corpus.files} files, "
        f"{corpus.megabytes:.1f} MB, {corpus.train.numel():,} tokens to train on"
    )

    # several processes of one training meet at one port, which a second training cannot have
    groups = [("unpatched", "patched"), ("control",)]
    runs = {}
    for group in groups if is_alone else [(variant,) for each in groups for variant in each]:
        runs |= trained_in_turn(settings, corpus, group)

    rows = differences(runs)
    agree = all(row.agrees for row in rows)
    if not is_first:  # all processes have the same figures
        return 0 if agree else 1
    output.mkdir(parents=True, exist_ok=True)
    picture(settings, runs, rows, output / "comparison.png")
    report = {
        "settings": asdict(settings),
        "versions": versions(settings.device),
        "runs": {variant: asdict(run) for variant, run in runs.items()},
        "differences": [asdict(row) for row in rows],
        "agree": agree,
    }
    (output / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")

    print(f"\n{table(settings, runs, rows)}\n")
    print(f"Written: {output / 'comparison.png'}, {output / 'comparison.json'}")
    print(verdict(settings, rows))
    return 0 if agree else 1


def trained_in_turn(settings: Settings, corpus: Corpus, variants: Sequence[str]) -> dict[str, Run]:
    context = get_context("spawn")
    turns = [context.Semaphore(variant == variants[0]) for variant in variants]
    futures = {}
    with ExitStack() as stack:
        for i, variant in enumerate(variants):
            own, following = turns[i], turns[(i + 1) % len(turns)]
            pool = ProcessPoolExecutor(1, context, take_turns, (own, following))
            future = stack.enter_context(pool).submit(train, settings, corpus, variant)

            def go_on_alone(_: object, following=following) -> None:  # also after an error
                for _ in range(settings.steps):
                    following.release()

            future.add_done_callback(go_on_alone)
            futures[variant] = future
        return {variant: future.result() for variant, future in futures.items()}


def parse_arguments() -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n    python")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def option(name: str, default, help: str, **kwargs) -> None:
        kwargs.setdefault("type", type(default))
        parser.add_argument(name, default=default, help=f"{help} (default: {default})", **kwargs)

    model_types = text_model_types()
    option("--model-type", "qwen3", f"one of {', '.join(model_types)}", metavar="TYPE")
    option("--vocab-size", 8192, "tokens in the vocabulary", metavar="V")
    option("--hidden-size", 128, f"features; a multiple of {2 * HEAD_DIM}", metavar="H")
    option("--layers", 4, "decoder layers", metavar="N")
    option("--length", 256, "tokens in a sequence", metavar="TOKENS")
    option("--batch-size", 4, "sequences in a forward pass", metavar="N")
    option("--gradient-accumulation-steps", 1, "forward passes in a step", metavar="N")
    option("--steps", 30, "optimizer steps", metavar="N")
    option("--learning-rate", 2e-3, "highest, after a warm-up of a tenth", metavar="LR")
    option("--chunk-mib", 8.0, "MiB of logits that the patched run holds at a time", metavar="MIB")
    option("--device", "auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    option(
        "--dtype",
        "auto",
        "bfloat16 is autocast over float32 weights; auto: float32 on the CPU, bfloat16 on CUDA",
        choices=("auto", "float32", "bfloat16"),
    )
    option("--seed", 0, "of the weights and the order of the text", metavar="N")
    option("--output", Path("outputs/train"), "folder for the picture and the figures", type=Path)
    arguments = parser.parse_args()

    def require(fits: bool, name: str, expected: str) -> None:
        if not fits:
            value = getattr(arguments, name)
            parser.error(f"--{name.replace('_', '-')} must be {expected}, got {value!r}")

    supported = f"a text model of liger_patch.registry ({', '.join(model_types)})"
    require(arguments.model_type in model_types, "model_type", supported)
    require(
        arguments.vocab_size >= SMALLEST_VOCABULARY, "vocab_size", f"{SMALLEST_VOCABULARY} or more"
    )
    multiple = 2 * HEAD_DIM
    require(
        arguments.hidden_size > 0 and arguments.hidden_size % multiple == 0,
        "hidden_size",
        f"a positive multiple of {multiple}",
    )
    for name in ("layers", "batch_size", "gradient_accumulation_steps"):
        require(getattr(arguments, name) > 0, name, "1 or more")
    require(arguments.length > 1, "length", "2 or more")
    require(arguments.steps > UNTIMED_STEPS, "steps", f"{UNTIMED_STEPS + 1} or more")

    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    usable = arguments.device == "cpu" or torch.cuda.is_available()
    require(usable, "device", "cpu where PyTorch finds no CUDA GPU")
    if arguments.dtype == "auto":
        arguments.dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    names = [field.name for field in fields(Settings)]
    return Settings(**{name: getattr(arguments, name) for name in names}), arguments.output


def versions(device: str) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "liger_patch": liger_patch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
