"""Forward and backward of the loss of real heads: time and memory beside peers and bare products.

    python benchmarks/linear_cross_entropy.py                     all cases: table, JSON, picture
    python benchmarks/linear_cross_entropy.py --case Gemma-2-2B

Every case runs in this one process, contenders interleaved. Before anything is timed, each
contender's gradients are compared with a float32 computation on a part of the tokens: one that is
wrong is not timed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import triton
from contenders import bare_products, contenders, step
from heads import HEADS, Head, batch
from measure import measure
from report import terminal_table

PEER_PACKAGES = ("liger-kernel", "cut-cross-entropy")
MAX_RELATIVE_ERROR = 0.02  # of gradients by norm, against float32: bf16 rounding leaves about 0.003


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    results = []
    for head in HEADS:
        if arguments.case is None or head.name.startswith(arguments.case):
            rows = run_case(head, arguments.rounds)
            print(terminal_table(rows), flush=True)
            results += rows
    report = {
        "command": f"python benchmarks/linear_cross_entropy.py --rounds {arguments.rounds}",
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            **{name: _version(name) for name in PEER_PACKAGES if _version(name)},
        },
        "results": results,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "linear_cross_entropy.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no matplotlib here: draw it elsewhere with python benchmarks/picture.py {path}")
    else:
        from picture import draw

        draw(report, path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")


def run_case(head: Head, rounds: int) -> list[dict]:
    """Check, then time every contender on one case; the floor is the row "bare products"."""
    inputs = batch(head)
    losses = contenders(head)
    errors = gradient_errors(head, losses)
    functions = {"bare products": bare_products(head, *inputs)}
    for name, loss in losses.items():
        if max(errors[name]) <= MAX_RELATIVE_ERROR:
            functions[name] = lambda loss=loss: step(loss, *inputs)
    measured = measure(functions, before=functions["bare products"], rounds=rounds)
    torch.cuda.empty_cache()
    floor = measured["bare products"].ms
    rows = [
        {"case": head.name, "contender": name, **asdict(m), "floor_over_time": floor / m.ms}
        | ({"gradient_errors": errors[name]} if name in errors else {})
        for name, m in measured.items()
    ]
    rows += [
        {"case": head.name, "contender": name, "wrong": True, "gradient_errors": errors[name]}
        for name in losses
        if name not in measured
    ]
    return rows


def gradient_errors(head: Head, losses: dict) -> dict[str, list[float]]:
    """Relative errors, by norm, of each contender's gradients on 512 tokens, against float32."""
    small = Head(**{**asdict(head), "tokens": 512})
    inputs = batch(small, seed=1)
    wide = [
        t.detach().float().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in inputs
    ]
    _, *truth = step(losses["eager"], *wide)
    errors = {}
    for name, loss in losses.items():
        _, *gradients = step(loss, *inputs)
        errors[name] = [
            ((g.float() - t).norm() / t.norm()).item()
            for g, t in zip(gradients, truth, strict=True)
        ]
    return errors


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", help="only the cases whose name starts with this")
    parser.add_argument(
        "--rounds", type=int, default=20, help="timed calls of each contender (default 20)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of JSON and picture"
    )
    return parser


if __name__ == "__main__":
    main()
