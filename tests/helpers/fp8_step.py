"""Compare steps over a base in FP8 with steps over its dequantized weights, in each process of a
group, under wrappers of torch. Its cases are engines.
"""

from __future__ import annotations

from typing import Any

import torch
from engines import ENGINES
from exactness import assert_no_worse
from gloo_group import each_case
from lora_models import adapted
from tiny_models import tiny_batch
from torch import Tensor
from torch import distributed as dist

from liger_patch import apply_patch, quantize_base
from liger_patch.layers.quantized_base import Fp8Linear


def step(engine: str, model: Any, layers: Any) -> dict[str, Tensor]:
    """The loss, and the gradients that this rank holds, by name."""
    engined = ENGINES[engine](apply_patch(model.train(), layers=layers))
    loss = engined.module(**tiny_batch(model.get_base_model(), seed=dist.get_rank())).loss
    loss.backward()
    return {"loss": loss.detach(), **engined.gradients()}


def check(engine: str, *_: object) -> None:
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


if __name__ == "__main__":
    each_case(check)
