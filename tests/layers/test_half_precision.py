"""Steps of models in 16 bits, with layers on kernels, are no worse than eager's."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import call, gradients, joined, patched, step, widened


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "qwen3", "olmo2", "phi3", "gemma3n_text", "cohere"]
)
@pytest.mark.parametrize("kind", slow_but(["weights"], ["weights", "autocast"]))
def test_16_bit_weights_and_autocast_are_no_worse(kind: str, model_type: str) -> None:
    """On three batches: the largest error of a tiny model is luck to some degree."""
    model = tiny_model(model_type)
    if kind == "weights":
        model.bfloat16()
    wide = widened(model)
    found: list[list[Tensor]] = [[], [], []]
    for seed in range(3):
        batch = tiny_batch(model, seed=seed)
        steps = [step(wide, batch)]
        for layers in (False, True):
            with patched(model, layers=layers):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
                    outputs = call(model, batch)
                assert outputs.logits.dtype == torch.bfloat16
                steps.append({"loss": outputs.loss.detach(), **gradients(model, outputs.loss)})
        for values, each in zip(found, joined(*steps), strict=True):
            values.extend(each.values())
    truth, eager, ours = ({"loss and gradients": torch.cat(values)} for values in found)
    assert_no_worse(ours, eager, truth, torch.bfloat16)
