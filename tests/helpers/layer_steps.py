"""Compare steps whose layers run another way with the same steps as they are, in each process of a
group, under wrappers of torch. Cases: "sliced ENGINE", feed-forward layers in slices and at once;
and "fp8 ENGINE", a base in FP8 and its dequantized weights.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import torch
from engines import ENGINES, base_of
from exactness import assert_no_worse
from gloo_group import each_case
from lora_models import adapted
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch import distributed as dist

from liger_patch import apply_patch, quantize_base
from liger_patch.kernels import chunk_sizes, gated_mlp
from liger_patch.layers.quantized_base import Fp8Linear

LONG_BYTES, SLICE_BYTES = 2**31, 5 * 8 * 64 * 7  # 7 tokens of 64 float64 features


def step(engine: str, model: Any, layers: Any = True, length: int = 9) -> dict[str, Tensor]:
    """The loss, and the gradients that this rank holds, by name; in float64."""
    engined = ENGINES[engine](apply_patch(model.train(), layers=layers))
    loss = engined.module(**tiny_batch(base_of(model), seed=dist.get_rank(), length=length)).loss
    loss.backward()
    return {"loss": loss.detach(), **engined.gradients()}


def checkpointed(kind: str, reentrant: bool) -> Any:
    """A model in float64, with adapters or without."""
    model: Any = adapted() if kind == "lora" else tiny_model()
    if kind == "lora":
        model.enable_input_require_grads()
    model.double().gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def check_slices(engine: str) -> None:
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")
    chunk_sizes.SLICE_BYTES = SLICE_BYTES
    runs: list[int] = []
    result = gated_mlp._result_of_slices

    def counted(x: Tensor, layer: Any, slices: Any, *others: Any) -> Tensor:
        runs.append(len(slices))
        return result(x, layer, slices, *others)

    with patch.object(gated_mlp, "_result_of_slices", counted):
        for kind in ("full", "lora"):
            for reentrant in (False, True):
                case = engine, kind, reentrant
                chunk_sizes.LONG_BYTES = LONG_BYTES
                at_once = step(engine, checkpointed(kind, reentrant), length=31)
                assert not runs, case
                chunk_sizes.LONG_BYTES = 0
                in_slices = step(engine, checkpointed(kind, reentrant), length=31)
                assert len(runs) == (4 if reentrant else 2), (case, runs)
                assert len(at_once) > 10, case
                assert_no_worse(in_slices, at_once, at_once, torch.float32)
                runs.clear()


def check_fp8(engine: str) -> None:
    for layers in (False, ["lora", "gated"]):
        quantized, plain = quantize_base(adapted().double()), adapted().double()
        held = {n: m for n, m in quantized.named_modules() if isinstance(m, Fp8Linear)}
        assert len(held) == 14
        for name, layer in held.items():
            weight: Any = plain.get_submodule(name).weight
            weight.data = layer.held(torch.float64).dequantized()
        truth = step(engine, plain, layers)
        assert len(truth) == 29
        assert_no_worse(step(engine, quantized, layers), truth, truth, torch.float32)


def check(case: str, *_: object) -> None:
    kind, engine = case.split()
    {"sliced": check_slices, "fp8": check_fp8}[kind](engine)


if __name__ == "__main__":
    each_case(check)
