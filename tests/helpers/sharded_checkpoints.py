"""Sharded checkpoints of patched models under FSDP2, for test_distributed: PyTorch's distributed
checkpoints (DCP), through its own functions and through accelerate's.

Run once for each process. Exits with an error unless the checkpoint has an unpatched model's keys,
and gives its weights to an unpatched and to a patched model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_models import make_model
from engines import ENGINES, Engine
from gloo_group import each_case
from tiny_models import tiny_batch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from liger_patch import apply_patch, patch_status


def check(name: str, folder: Path, _: str) -> None:
    folder = folder / name
    trained = make_engine(name, patch=True)
    trained.backward(loss_of(trained))
    trained.step()
    expected, loss = trained.weights(), loss_of(trained).detach()
    assert patch_status(trained.model).fused, patch_status(trained.model).reason
    keys = get_model_state_dict(trained.module).keys()
    assert keys == get_model_state_dict(make_engine(name, patch=False).module).keys()
    save(trained, folder)
    for patch in (False, True):
        loaded = make_engine(name, patch=patch)
        assert any(not w.equal(expected[n]) for n, w in loaded.weights().items())
        load(loaded, folder)
        for parameter, weight in loaded.weights().items():
            assert weight.equal(expected[parameter]), f"{parameter}, patched: {patch}"
        torch.testing.assert_close(loss_of(loaded).detach(), loss)


def make_engine(name: str, *, patch: bool) -> Engine:
    model = make_model(torch.device("cpu"))
    if patch:
        apply_patch(model)
    return ENGINES[name](model)


def loss_of(engine: Engine) -> Tensor:
    return engine.module(**tiny_batch(engine.model, seed=dist.get_rank())).loss  # pyright: ignore[reportArgumentType]


def save(engine: Engine, folder: Path) -> None:
    accelerator = engine.accelerator
    if accelerator is not None:
        accelerator.save_state(str(folder))
        return
    checkpoint.save(get_model_state_dict(engine.module), checkpoint_id=folder)


def load(engine: Engine, folder: Path) -> None:
    accelerator = engine.accelerator
    if accelerator is not None:
        accelerator.load_state(str(folder))
        return
    state: dict[str, Any] = get_model_state_dict(engine.module)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(engine.module, state)


if __name__ == "__main__":
    each_case(check)
