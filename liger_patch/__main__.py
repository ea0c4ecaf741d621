"""The command line: ``python -m liger_patch`` with ``try``, ``run``, ``estimate`` or ``doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from liger_patch import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit without the usage, which takes more lines than the error."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return what reads an option, and says what is expected of one that does not fit."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return read


_size = _number("a number > 0", lambda value: 0 < value < math.inf)
_reserve = _number("a number >= 0", lambda value: 0 <= value < math.inf)
_share = _number("a number > 0 and <= 1", lambda value: 0 < value <= 1)


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number > 0, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from liger_patch.cli.doctor import doctor

        return doctor()
    if options.command in ("try", "run"):
        return _train(options.parser, options)
    return _estimate(options.parser, options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m liger_patch")
    parser.add_argument("--version", action="version", version=f"liger_patch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="test this machine in seconds, and print what a bug report needs"
    )
    for name, does in (
        ("try", "run a training script for some steps, as it is and patched, and compare"),
        ("run", "patch what a training script trains, and run it to its end"),
    ):
        train = commands.add_parser(name, help=does, description=does)
        train.set_defaults(parser=train)
        if name == "try":
            train.add_argument("--steps", type=_whole, default=20,
                help="optimizer steps of each (default: 20)")  # fmt: skip
            train.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
        train.add_argument("script", metavar="SCRIPT", help="a training script, unchanged")
        train.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    estimate = commands.add_parser(
        "estimate", help="say where the memory of a training step goes, without a download or a GPU"
    )
    estimate.set_defaults(parser=estimate)
    add = estimate.add_argument
    add("model", metavar="MODEL", help="a name in the local cache, a folder, or a config.json")
    add("--batch", type=_whole, default=1, help="sequences of a step (default: 1)")
    add("--length", type=_whole, default=2048, help="tokens of each sequence (default: 2048)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of the weights (default: bfloat16)")  # fmt: skip
    add("--no-autocast", action="store_true",
        help="without autocast to 16 bits, which Trainer(bf16=True) has")  # fmt: skip
    add("--lora-rank", type=_whole,
        help="of adapters on all linear layers but the head, and on all experts")  # fmt: skip
    add("--bits", type=int, choices=(4,), help="4: linear layers in nf4 (with --lora-rank)")
    add("--double-quant", action="store_true", help="bnb_4bit_use_double_quant=True")
    add("--quantize-base", choices=("fp8",),
        help="what quantize_base holds linear layers in (with --lora-rank)")  # fmt: skip
    add("--quantize-experts", choices=("nf4", "mxfp4"),
        help="what quantize_experts holds experts in (with --lora-rank)")  # fmt: skip
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    add("--checkpoint-offload", action="store_true",
        help="liger_patch's checkpoint_offload=True (with --checkpointing), and a host that holds "
        "all of them")  # fmt: skip
    add("--optimizer", choices=("adamw", "adamw-float32", "adamw-8bit", "none"), default="adamw",
        help="whose states count (default: adamw, in the dtype of the weights)")  # fmt: skip
    add("--chunk-mib", type=_size, help="liger_patch's chunk_mib")
    add("--supervised", type=_share, default=1.0, help="share of labels that count (default: 1)")
    add("--attention", choices=("sdpa", "eager"), help="default: what Transformers chooses")
    add("--reserve-gib", type=_reserve, default=1.0,
        help="of a GPU, what a step cannot have: CUDA's context, gaps (default: 1)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _train(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        parser.error(f"argument SCRIPT: expected a file, got {options.script}")
    if options.command == "run":
        from liger_patch.cli.run import run

        return run(options.script, options.arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error(
            "try compares runs of one process: start it without a launcher; run trains under one"
        )
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: expected a file in an existing folder, got {options.json}")
    from liger_patch.cli.compare import compare

    return compare(options.script, options.arguments, options.steps, options.json)


def _estimate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    for name in ("bits", "quantize_base", "quantize_experts"):
        if getattr(options, name) and not options.lora_rank:
            option = name.replace("_", "-")
            parser.error(
                f"argument --{option}: quantized weights do not train: expected --lora-rank too"
            )
    if options.double_quant and not options.bits:
        parser.error("argument --double-quant: expected --bits 4 too")
    if options.checkpoint_offload and not options.checkpointing:
        parser.error("argument --checkpoint-offload: expected --checkpointing too")
    if options.lora_rank and importlib.util.find_spec("peft") is None:
        parser.error("argument --lora-rank: it needs peft, which is not installed")
    print(f"estimating {options.model}: seconds, for a large model a minute", file=sys.stderr)
    warnings.simplefilter("ignore")  # Transformers' own, of names that it will change
    import torch

    from liger_patch.estimate.estimate import GIB, estimate
    from liger_patch.estimate.model import (
        EXPERTS_IN_4_BITS,
        TrainingStep,
        load_config,
        of_checkpoint,
    )
    from liger_patch.estimate.report import report

    dtype = getattr(torch, options.dtype)
    products = torch.bfloat16 if dtype == torch.float32 else dtype
    fields, given = TrainingStep.__dataclass_fields__, vars(options)
    how = {name: given[name] for name in fields.keys() & given.keys()} | {"dtype": dtype}
    step = TrainingStep(
        **how,
        autocast=None if options.no_autocast else products,
        fp8_base=bool(options.quantize_base),
        expert_bytes=EXPERTS_IN_4_BITS.get(options.quantize_experts),
    )
    try:
        config = load_config(options.model)
        step = of_checkpoint(config, step)
        if step.bits and step.fp8_base:
            parser.error(f"argument --quantize-base: linear layers are in {step.bits} bits already")
        estimates = estimate(config, step, int(options.reserve_gib * GIB))
    except ValueError as error:
        parser.error(str(error))
    print(report(options.model, config, step, estimates, as_json=options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
