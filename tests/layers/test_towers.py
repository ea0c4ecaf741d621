"""Towers that no training step gives gradients: the same with layers on kernels. The others are
trained by tests/test_images_and_sound.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from tiny_models import ROWS, tiny_model
from torch import Tensor, nn

from liger_patch import apply_patch
from liger_patch.layers.checks import layers_of
from liger_patch.layers.replace import LAYERS, replace_layers

# of models that encode sound without gradients, and the field of the outputs that is compared
TOWERS = {
    ("vibevoice", "audio_tower"): "audio",
    ("vibevoice", "semantic_tokenizer_encoder"): "latents",
    ("vibevoice_asr", "acoustic_tokenizer_encoder"): "latents",
    ("vibevoice_asr", "semantic_tokenizer_encoder"): "latents",
}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def result_and_gradients(
    tower: nn.Module, inputs: Tensor, field: str
) -> tuple[Tensor, dict[str, Tensor]]:
    tower.zero_grad()
    torch.manual_seed(0)  # some towers draw noise
    y = getattr(tower(inputs), field)
    y.backward(randn(*y.shape).to(y.dtype))
    found = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    return y.detach(), found


def assert_same(tower: nn.Module, inputs: Tensor, field: str, patch: Callable[[], object]) -> None:
    y, gradients = result_and_gradients(tower, inputs, field)
    patch()
    assert any(layers_of(module) for module in tower.modules())
    patched, patched_gradients = result_and_gradients(tower, inputs, field)
    close = {"rtol": 1e-5, "atol": 1e-5 * y.abs().max().item()}  # Transformers rounds to float32
    torch.testing.assert_close(patched, y, **close)
    assert patched_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close["atol"] = 1e-5 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(patched_gradients[name], gradient, **close)


@pytest.mark.parametrize(("model_type", "name"), TOWERS, ids=["-".join(each) for each in TOWERS])
def test_a_tower_on_kernels(model_type: str, name: str):
    if model_type not in ROWS:
        pytest.skip("this Transformers has no such model")
    model = tiny_model(ROWS[model_type]).double()
    tower, samples = getattr(model.model, name), randn(2, 1, 24)
    assert_same(tower, samples, TOWERS[model_type, name], lambda: apply_patch(model))


def test_tables_of_angles_that_train():
    """MLCD's first angle is a parameter: such tables stay with the model's own function."""
    config = transformers.MLCDVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    tower = transformers.MLCDVisionModel(config).double()
    pixels = randn(1, 3, 16, 16)

    def patch() -> None:
        replace_layers(tower, frozenset(LAYERS))

    assert_same(tower, pixels, "last_hidden_state", patch)
