"""Heads with LoRA and quantised heads, beside the plain frozen head: time and memory.

    python benchmarks/kinds_of_heads.py

Forward and backward of the loss and of the head itself, with the gradients of the hidden states and
of the adapter. The kinds run in this one process, contenders interleaved; before anything is timed,
our gradients are compared with eager's. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attempts import Failure, attempt, release_memory
from contenders import bare_products
from gradient_check import MAX_RELATIVE_ERROR
from heads import HEADS, Head, batch
from measure import measure
from provenance import command_line, provenance
from report import FLOOR, terminal_table
from torch import Tensor, nn

from liger_patch import linear_cross_entropy

PACKAGES = ("bitsandbytes",)
(LLAMA,) = (head for head in HEADS if head.name == "Llama-3-8B, frozen")
QWEN = Head("Qwen3-8B, frozen", 4096, 151936, 8192, frozen=True)


@dataclass(frozen=True)
class Kind:
    """One case.

    Attributes:
        name: of the model and what is special.
        head: shape of the head, frozen.
        rank: of an adapter (LoRA) on it, 0 for none.
        quantised: whether bitsandbytes holds it in 4 bits (nf4).
    """

    name: str
    head: Head
    rank: int = 0
    quantised: bool = False


KINDS = (
    Kind("Llama-3-8B, frozen", LLAMA),
    Kind("Llama-3-8B, frozen, LoRA r 16", LLAMA, rank=16),
    Kind("Llama-3-8B, frozen, LoRA r 64", LLAMA, rank=64),
    Kind("Qwen3-8B, frozen", QWEN),
    Kind("Qwen3-8B, 4 bits", QWEN, quantised=True),
    Kind("Qwen3-8B, 4 bits, LoRA r 16", QWEN, rank=16, quantised=True),
)


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "kinds_of_heads.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "heads": []}
    for kind in KINDS:
        rows = attempt(lambda kind=kind: run_kind(kind, rounds=arguments.rounds))
        if isinstance(rows, Failure):
            key = {"case": kind.name, "tokens": kind.head.tokens, "contender": FLOOR}
            rows = [key | asdict(rows)]
        release_memory()
        print(terminal_table(rows), flush=True)
        report["heads"] += rows
        path.write_text(json.dumps(report, indent=1) + "\n")


def run_kind(kind: Kind, *, rounds: int, device: torch.device | str = "cuda") -> list[dict]:
    """Compare, then time eager and ours on one kind; the floor is the first row."""
    hidden_states, weight, labels = batch(kind.head, device=device)
    floor = bare_products(kind.head, hidden_states, weight, labels)
    leaves, layer = [hidden_states], None
    if kind.rank:
        a = torch.randn(kind.rank, kind.head.hidden_size, device=device) / 64
        b = torch.randn(kind.head.vocab_size, kind.rank, device=device) / 64
        leaves += [each.bfloat16().requires_grad_() for each in (a, b)]
    if kind.quantised:
        layer = _quantised(weight, device)
        weight = None
    steps = {
        "eager": partial(_step, partial(_eager, layer, weight, labels), leaves),
        "liger_patch": partial(_step, partial(_ours, layer, weight, labels), leaves),
    }
    eager, ours = (step() for step in steps.values())
    errors = [
        ((a.float() - b.float()).norm() / a.float().norm()).item()
        for a, b in zip(eager, ours, strict=True)
    ]
    del eager, ours
    if max(errors) > MAX_RELATIVE_ERROR:
        raise RuntimeError(f"{kind.name}: gradients differ from eager's by {errors}")
    measured = measure({FLOOR: floor, **steps}, before=floor, rounds=rounds, device=device)
    rows = []
    for name, outcome in measured.items():
        row = {"case": kind.name, "tokens": kind.head.tokens, "contender": name, **asdict(outcome)}
        of_floor = measured[FLOOR]
        if "ms" in row and not isinstance(of_floor, Failure):
            row["floor_over_time"] = of_floor.ms / row["ms"]
        rows.append(row)
    return rows


def _quantised(weight: Tensor, device: torch.device | str) -> nn.Module:
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    parameters: Any = Params4bit  # whose constructor its metaclass hides
    vocab_size, hidden_size = weight.shape
    layer = Linear4bit(
        hidden_size, vocab_size, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    layer.weight = parameters(weight.detach().cpu(), requires_grad=False, quant_type="nf4")
    return layer.to(device)


def _adapter(x: Tensor, adapter: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
    return (nn.functional.linear(x, adapter[0]), adapter[1]) if adapter else None


def _eager(
    layer: nn.Module | None, weight: Any, labels: Tensor, x: Tensor, *adapter: Tensor
) -> Tensor:
    logits = nn.functional.linear(x, weight) if layer is None else layer(x)
    low_rank = _adapter(x, adapter)
    if low_rank is not None:
        logits = logits + nn.functional.linear(*low_rank)
    return nn.functional.cross_entropy(logits.float(), labels)


def _ours(
    layer: nn.Module | None, weight: Any, labels: Tensor, x: Tensor, *adapter: Tensor
) -> Tensor:
    if layer is not None:
        from liger_patch.integrations.bitsandbytes import quantized_weight

        weight = quantized_weight(layer, x.dtype)
    return linear_cross_entropy(x, weight, labels, low_rank=_adapter(x, adapter))


def _step(loss: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*leaves), leaves)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="timed calls of each contender (default 10)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON"
    )
    return parser


if __name__ == "__main__":
    main()
