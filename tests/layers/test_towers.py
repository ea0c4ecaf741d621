"""Vision and audio towers, which no call with text alone runs: the same with layers on kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model
from torch import Tensor, nn

from liger_patch import apply_patch, registry
from liger_patch.layers.checks import layers_of
from liger_patch.layers.replace import LAYERS, replace_layers

ROWS = {row.model_type: row for row in registry.available()}
GRID = torch.tensor([[1, 4, 4]])  # of patches: frames, height, width


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def mel_bins(tower: Any) -> int:
    return tower.config.num_mel_bins


TOWERS: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("ernie4_5_vl_moe", "vision_tower"): lambda _: (randn(16, 48), GRID),
    ("gemma3n", "audio_tower"): lambda tower: (
        randn(2, 64, tower.config.input_feat_size),
        torch.zeros(2, 64, dtype=torch.bool),
    ),
    ("glmasr", "audio_tower"): lambda tower: (randn(2, mel_bins(tower), 20),),
    ("idefics2", "connector"): lambda _: (
        randn(2, 16, 32),
        torch.ones(2, 16, dtype=torch.bool),
    ),
    ("kimi_k25", "vision_tower"): lambda _: (randn(16, 3, 4, 4), GRID),
    ("kosmos-2.5", "vision_model"): lambda _: (
        torch.cat([torch.ones(9, 1), torch.arange(1.0, 10)[:, None], randn(9, 768)], -1)[None],
    ),
    ("lighton_ocr", "vision_encoder"): lambda _: (
        randn(1, 3, 16, 16),
        torch.tensor([[16, 16]]),
    ),
    ("mistral_large4", "vision_tower"): lambda _: (
        randn(2, 3, 16, 16),
        torch.tensor([[16, 16]] * 2),
    ),
    ("muse_glimmer", "vision_tower"): lambda tower: (
        randn(16, tower.patch_embedder.patch_embedding.in_features),
        GRID,
    ),
    ("step3p7", "vision_model"): lambda _: (randn(2, 3, 16, 16),),
    ("video_llama_3", "vision_model"): lambda _: (
        randn(16, 48),
        GRID,
        torch.tensor([2]),
    ),
}


def result_and_gradients(
    tower: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    tower.zero_grad()
    y = tower(*inputs)
    y = y if isinstance(y, Tensor) else y.last_hidden_state
    y.backward(randn(*y.shape).to(y.dtype))
    found = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    return y.detach(), found


def assert_same(tower: nn.Module, inputs: tuple[Any, ...], patch: Callable[[], object]) -> None:
    y, gradients = result_and_gradients(tower, inputs)
    patch()
    assert any(layers_of(module) for module in tower.modules())
    patched, patched_gradients = result_and_gradients(tower, inputs)
    close = {"rtol": 1e-5, "atol": 1e-5 * y.abs().max().item()}  # Transformers rounds to float32
    torch.testing.assert_close(patched, y, **close)
    assert patched_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close["atol"] = 1e-5 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(patched_gradients[name], gradient, **close)


@pytest.mark.parametrize(("model_type", "name"), TOWERS, ids=[each for each, _ in TOWERS])
def test_a_tower_on_kernels(model_type: str, name: str):
    if model_type not in ROWS:
        pytest.skip("this Transformers has no such model")
    model = tiny_model(ROWS[model_type]).double()
    # Transformers 5.0 has some of them outside of model.model
    tower = next(each for path, each in model.named_modules() if path.split(".")[-1] == name)
    assert_same(tower, TOWERS[model_type, name](tower), lambda: apply_patch(model))


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
    pixels = (randn(1, 3, 16, 16),)
    assert_same(tower, pixels, lambda: replace_layers(tower, None, frozenset(LAYERS)))
