"""Training steps of a patched and of an unpatched model under engines, for test_distributed.

Run once for each process of the group, with one argument for each case ("fsdp2 --layers"). Exits
with an error unless losses and weights are eager's, and no real logits are computed, forward or
backward; or, where ``--fallback`` gives a reason, unless that is why they are.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import ENGINES, Engine
from gloo_group import join, leave
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch import distributed as dist

from liger_patch import apply_patch, patch_status
from liger_patch.deferred.head_call import HeadCall
from liger_patch.registry import available

STEPS, ACCUMULATED = 2, 2


def main(file: str, device_type: str, *cases: str) -> None:
    rank = int(os.environ["RANK"])
    join(file, rank, int(os.environ["WORLD_SIZE"]), device_type)
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--fallback", default="")
    parser.add_argument("--late", choices=["evaluation", "backward", "step"])
    for case in cases:
        print(f"case {case}", flush=True)
        check(parser.parse_args(shlex.split(case)))
    leave()


def check(arguments: argparse.Namespace) -> None:
    expected = train(make_engine(arguments, patch=False), arguments)
    engine = make_engine(arguments, patch=True)
    with count_logits() as computed, warnings.catch_warnings():
        warnings.filterwarnings("ignore" if arguments.fallback else "error", "liger_patch")
        results = train(engine, arguments)
    status = patch_status(engine.model)
    if arguments.fallback:
        assert not status.fused
        assert arguments.fallback in (status.reason or ""), status.reason
    else:
        assert status.fused, status.reason
        assert not computed, f"real logits were computed {len(computed)} times"
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, msg=lambda m, name=name: f"{name}: {m}")
    if arguments.late == "step":
        check_read_after_step(engine)
    elif arguments.late:
        check_read_late(engine, evaluates=arguments.late == "evaluation")


def device() -> torch.device:
    """Of this rank."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if is_cuda else torch.device("cpu")


def make_engine(arguments: argparse.Namespace, *, patch: bool) -> Engine:
    (row,) = (row for row in available() if row.model_type == "llama")
    model: Any = tiny_model(row)
    if arguments.tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.to(device())
    if patch:
        apply_patch(model, layers=arguments.layers)
    return ENGINES[arguments.engine](model)


@contextmanager
def count_logits() -> Iterator[list[HeadCall]]:
    """The products that are computed within this context, for a reader or in a backward pass."""
    computed: list[HeadCall] = []
    compute = HeadCall.compute

    def counted(self: HeadCall, *tensors: Any) -> Tensor:
        computed.append(self)
        return compute(self, *tensors)

    HeadCall.compute = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield computed
    finally:
        HeadCall.compute = compute


def batch_of(engine: Engine, seed: int) -> dict[str, Tensor]:
    """Of this rank; tensor parallel ranks share one."""
    rank = 0 if engine.shares_batch else dist.get_rank()
    batch = tiny_batch(engine.model, seed=2 * seed + rank)
    return {name: value.to(device()) for name, value in batch.items()}


def train(engine: Engine, arguments: argparse.Namespace) -> dict[str, Tensor]:
    """Losses, and the weights after some steps."""
    results = {}
    accumulated = 1 if arguments.engine.startswith("zero") else ACCUMULATED
    for step in range(STEPS):
        for i in range(accumulated):
            outputs = engine.module(**batch_of(engine, step * accumulated + i))
            engine.backward(outputs.loss)
            results[f"loss {step} {i}"] = outputs.loss.detach().cpu()
        engine.step()
    return results | engine.weights()


def check_read_after_step(engine: Engine) -> None:
    outputs = engine.module(**batch_of(engine, 9))
    engine.backward(outputs.loss)
    engine.step()
    with pytest.raises(RuntimeError, match="the head's weight changed"):
        outputs.logits.sum()


def check_read_late(engine: Engine, *, evaluates: bool) -> None:
    """Where the weight was freed, an error says what to do to read logits, and that works."""
    module: Any = engine.module
    batch = batch_of(engine, 9)
    with torch.set_grad_enabled(not evaluates):
        outputs = module(**batch)
    with torch.no_grad():
        expected = module(**{name: v for name, v in batch.items() if name != "labels"}).logits
    if not evaluates:
        outputs.loss.backward()
    with pytest.raises(RuntimeError, match=r"unshard\(\)"):
        outputs.logits.sum()
    module.unshard()
    torch.testing.assert_close(outputs.logits.detach(), expected)
    module.reshard()
    if not evaluates:
        outputs = module(**batch)
        outputs.loss.backward()
        engine.step()
        module.unshard()
        with pytest.raises(RuntimeError, match="the head's weight changed"):
            outputs.logits.sum()


if __name__ == "__main__":
    main(*sys.argv[1:])
