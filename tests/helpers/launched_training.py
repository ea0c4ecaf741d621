"""What examples/train.py trains in each process of accelerate's launcher, on made-up text, for
test_examples. On CPUs, which accelerate alone does not shard over.

Prints what trained, and exits with an error unless the loss fell.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import training  # noqa: E402
from corpus import Corpus  # noqa: E402
from gloo_group import compile_no_collectives, leave  # noqa: E402
from training import Settings, take_turns, train  # noqa: E402


def main() -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from engines import shard_on_cpus

        shard_on_cpus()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        compile_no_collectives()
    trainers: list[Any] = []

    class Trainer(training.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

    training.Trainer = Trainer
    settings = Settings(
        model_type="llama",
        vocab_size=64,
        hidden_size=64,
        layers=2,
        length=16,
        batch_size=2,
        gradient_accumulation_steps=2,
        steps=4,
        learning_rate=1e-2,
        chunk_mib=1.0,
        device="cpu",
        dtype="float32",
        seed=0,
    )
    blocks = torch.arange(64).expand(16, 64)[:, :16].contiguous()
    corpus = Corpus(files=1, megabytes=0.0, train=blocks, evaluation=blocks[:4], end_of_file_id=0)
    turn: Any = Semaphore()
    take_turns(turn, turn)  # no other variant trains beside it
    run = train(settings, corpus, "patched")
    assert min(run.loss) < run.loss[0] - 0.5, run.loss
    if os.environ["RANK"] == "0":
        result = {
            "wrapper": type(trainers[0].model_wrapped).__name__,
            "processes": trainers[0].args.world_size,
            "ordinary_because": run.ordinary_because,
        }
        print(f"\n{json.dumps(result)}", flush=True)
    leave()


if __name__ == "__main__":
    main()
