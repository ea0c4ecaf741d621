"""Every row that takes images or sound: one training step with them computes the loss and each
gradient of the eager model, those of towers and projectors included.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from rows import IS_NEWEST, skipped_where_eager_fails
from tiny_media import IMAGES, SOUND, with_media
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor
from training_step import assert_fused, assert_same_step, call, patched, router_arguments, step

from liger_patch import registry

TABLES = {"images": IMAGES, "sound": SOUND}
CASES = [(kind, each) for kind, table in TABLES.items() for each in table if each in ROWS]
ARGUMENTS = {  # by which a model takes them
    "images": {"flattened_patches", "image_patches", "image_pixel_values", "pixel_values"},
    "sound": {"audio_input_features", "input_features", "input_values"},
}


def name(case: tuple[str, str]) -> str:
    return "-".join(reversed(case))


def others(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with other images or sound of the same form: the same values elsewhere."""
    return {
        n: v.roll([1] * (v.dim() - 1), list(range(v.dim() - 1)))
        if isinstance(v, Tensor) and v.is_floating_point()
        else v
        for n, v in batch.items()
    }


@pytest.mark.parametrize("kind", TABLES)
def test_every_row_with_images_or_sound_has_some(kind: str) -> None:
    takes_them = set()
    for row in ROWS.values():
        forward = getattr(transformers, row.class_name).forward
        if ARGUMENTS[kind] & set(inspect.signature(forward).parameters):
            takes_them.add(row.model_type)
    assert takes_them <= TABLES[kind].keys()
    assert TABLES[kind].keys() <= {row.model_type for row in registry.ARCHITECTURES}
    if IS_NEWEST:
        assert takes_them == TABLES[kind].keys()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_loss_and_each_gradient_agree_in_float64(case: tuple[str, str]) -> None:
    kind, model_type = case
    model = tiny_model(model_type).double()
    with skipped_where_eager_fails(model_type):
        batch = with_media(model, tiny_batch(model), TABLES[kind][model_type])
        batch |= router_arguments(model)
        eager = step(model, batch)
    with patched(model, strict=True):
        ours = step(model, batch)
        assert_fused(model)
        with torch.no_grad():
            other = call(model, others(batch)).loss
    is_used = not torch.allclose(other, eager["loss"], rtol=1e-9, atol=0.0)
    if not is_used and not IS_NEWEST:
        pytest.skip(f"Transformers {transformers.__version__} drops them on the way")
    assert is_used
    assert_same_step(ours, eager)
