"""Train a small model with Trainer under FSDP2 and ZeRO-3: do its losses stay those of one GPU?

    python -m benchmarks distributed_convergence --gpus 2
    python -m benchmarks distributed_convergence --device cpu --steps 5     tiny, in float32

The model, its text and the order of the batches are the same in every run, on one GPU and on
several. Rounding makes two runs drift apart, so the yardstick is eager's own drift: the largest of
eager's under the same engine from eager on one GPU, and those of eager on one GPU from weights that
were moved within rounding, several times. A drift is the mean over all steps of how far the
training losses are apart. Exits with 1 where a patched run has drifted farther from eager on one
GPU than twice the yardstick, or was not fused.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing.spawn import start_processes

from examples.corpus import Corpus, build_corpus

from .benchmark import Benchmark, Cases
from .convergence_report import curve_difference
from .distributed_training import ALONE, ENGINES, ROUNDED, Settings, train_all
from .names import EAGER, OURS

ORDER = [ALONE, *ENGINES]
FACTOR = 2.0  # as for every error in this project: ours may be twice eager's
EPS = 2.0**-23  # of float32, in which a loss is logged
TINY = Settings("cpu", "float32", 512, 64, layers=2, length=32, batch_size=4, steps=5)


def run_all(settings: Settings, ranks: int) -> list[dict]:
    """Train in a process a GPU."""
    corpus = build_corpus(settings.vocab_size, settings.length)
    few = corpus.train[: settings.steps * settings.batch_size]
    rows = [
        row | {"gpus": 1 if row["engine"] == ALONE else ranks}
        for row in _in_processes(settings, replace(corpus, train=few), ranks)
    ]
    return sorted(rows, key=lambda row: (ORDER.index(row["engine"]), row["contender"]))


def _in_processes(settings: Settings, corpus: Corpus, ranks: int) -> list[dict]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(rank) for rank in range(ranks)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = []
        try:
            for rank in range(ranks):
                if settings.device == "cuda":  # else each would train on all of them
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
                arguments = rank, ranks, settings, corpus, folder
                started.append(
                    start_processes(train_all, arguments, join=False, start_method="spawn")
                )
            while not all([each.join(timeout=1) for each in started]):
                pass
        finally:
            for process in (process for each in started for process in each.processes):
                process.kill()
            if before is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        files = [Path(folder) / f"rows{rank}.json" for rank in range(ranks)]
        return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def cases(options: argparse.Namespace) -> Cases:
    """Return the one case, which builds its text when it runs."""
    settings = _settings(options)
    ranks = options.gpus or max(2, torch.cuda.device_count())
    if options.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return {"distributed_convergence": [partial(run_all, settings, ranks)]}


def _settings(options: argparse.Namespace) -> Settings:
    settings = TINY if options.device == "cpu" else Settings()
    return settings if options.steps is None else replace(settings, steps=options.steps)


class Verdict(NamedTuple):
    """How far a patched run has drifted from eager on one GPU, in nats, and how far it may.

    Attributes:
        fused: whether its last loss was; otherwise the comparison means nothing.
    """

    engine: str
    drift: float
    allowed: float
    fused: bool

    @property
    def holds(self) -> bool:
        return self.fused and self.drift <= self.allowed  # False for nan


def verdicts(rows: list[dict]) -> list[Verdict]:
    """Return one for each engine, and for one GPU."""
    runs = {(row["engine"], row["contender"]): row for row in rows}
    truth = runs[ALONE, EAGER]
    rounding = EPS * sum(truth["training"]) / len(truth["training"])
    rounded = [row for row in rows if row["contender"] == ROUNDED]
    least = max(rounding, *(curve_difference(row, truth) for row in rounded))
    found = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        eager, ours = runs[engine, EAGER], runs[engine, OURS]
        allowed = FACTOR * max(least, curve_difference(eager, truth))
        found.append(Verdict(engine, curve_difference(ours, truth), allowed, ours["fused"]))
    return found


def finish(report: dict) -> int:
    """Return 1 where a patched run has drifted too far."""
    found = verdicts(report["distributed_convergence"])
    for each in found:
        print(f"{each.engine}: drift {each.drift:.2e}, allowed {each.allowed:.2e}")
    wrong = [verdict.engine for verdict in found if not verdict.holds]
    print(f"NOT as close as eager's: {', '.join(wrong)}" if wrong else "All as close as eager's.")
    return 1 if wrong else 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, help="processes, one a GPU (default all)")
    parser.add_argument(
        "--steps", type=int, help=f"of the optimizer (default {Settings.steps}; cpu: {TINY.steps})"
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny, in float32"
    )


BENCHMARK = Benchmark(
    packages=("transformers", "accelerate", "deepspeed", "tokenizers"),
    cases=cases,
    add_options=_add_options,
    header=lambda options: {"settings": asdict(_settings(options))},
    finish=finish,
)
