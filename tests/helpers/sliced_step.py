"""Compare steps whose feed-forward layers run in slices with steps at once, in each process of a
group, under wrappers of torch.
Its cases are engines.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import torch
from engines import ENGINES
from exactness import assert_no_worse
from gloo_group import each_case
from lora_models import ROWS, adapted
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch import distributed as dist

from liger_patch import apply_patch
from liger_patch.kernels import chunk_sizes, gated_mlp

LONG_BYTES, SLICE_BYTES = 2**31, 5 * 8 * 64 * 7  # 7 tokens of 64 float64 features


def step(engine: str, kind: str, reentrant: bool, long_bytes: int) -> dict[str, Tensor]:
    """The loss, and the gradients that this rank holds, by name; in float64."""
    chunk_sizes.LONG_BYTES, chunk_sizes.SLICE_BYTES = long_bytes, SLICE_BYTES
    model = (adapted() if kind == "lora" else tiny_model(ROWS["llama"])).double()
    base = model.get_base_model() if kind == "lora" else model
    if kind == "lora":
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    apply_patch(model.train())
    engined = ENGINES[engine](model)
    loss = engined.module(**tiny_batch(base, seed=dist.get_rank(), length=31)).loss
    loss.backward()
    return {"loss": loss.detach(), **engined.gradients()}


def check(engine: str, *_: object) -> None:
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")
    runs: list[int] = []
    result = gated_mlp._result_of_slices

    def counted(x: Tensor, layer: Any, slices: Any, *others: Any) -> Tensor:
        runs.append(len(slices))
        return result(x, layer, slices, *others)

    with patch.object(gated_mlp, "_result_of_slices", counted):
        for kind in ("full", "lora"):
            for reentrant in (False, True):
                case = engine, kind, reentrant
                at_once = step(*case, LONG_BYTES)
                assert not runs, case
                in_slices = step(*case, 0)
                assert len(runs) == (4 if reentrant else 2), (case, runs)
                assert len(at_once) > 10, case
                assert_no_worse(in_slices, at_once, at_once, torch.float32)
                runs.clear()


if __name__ == "__main__":
    each_case(check)
