"""Layers of every row of the registry: which of them are on kernels by which rules, and that they
compute what the eager model's do.
"""

from __future__ import annotations

import pytest
import torch
from exactness import assert_no_worse
from rows import every_row, is_known_well
from rows import model_type as row_name
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import call, gradients, joined, patched, step, widened

from liger_patch import apply_patch, registry
from liger_patch.layers.attention import ATTENTIONS
from liger_patch.layers.replace import ENDINGS, count_layers

SUBTRACT_A_MEAN = ("cohere", "cohere2", "phi", "starcoder2")  # their norms: no kernel


@pytest.mark.parametrize("row", every_row(), ids=row_name)
def test_every_row_has_its_layers_on_kernels(row: registry.Architecture) -> None:
    model = apply_patch(tiny_model(row))
    counts = count_layers(model)
    if is_known_well(row):  # which of the others have, test_every_architecture asks the probes
        assert (counts["rms_norm"] > 0) == (row.model_type not in SUBTRACT_A_MEAN)
        assert counts["rotary"] > 0 or registry.missing()  # nothing is promised on an older one
    if any(type(m).__name__ == "Qwen2MLP" for m in model.modules()):
        assert counts["gated"] >= model.config.get_text_config().num_hidden_layers


def test_every_class_with_a_rule_is_looked_at() -> None:
    for name in ATTENTIONS:
        assert name.endswith(tuple(ENDINGS)), f"{name} is never tried: add its ending to ENDINGS"


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
