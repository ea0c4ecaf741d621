"""Adapters of PEFT that are merged into the weights, or taken out again, around a forward pass."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from training_step import call

from liger_patch import apply_patch, patch_status

peft = pytest.importorskip("peft")


# PEFT says so where an adapter touches a tied head, which is what is tested.
# An older PEFT ties no adapters of tied layers, and says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
    "ignore:You have requested .ensure_weight_tying.:UserWarning",
)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_first_read_after_a_merge_are_an_error(target: str, dtype: torch.dtype) -> None:
    """A merge writes through ``weight.data``, to the head's own weight or to one tied to it."""
    base: Any = tiny_model(dtype=dtype)
    if target == "embed_tokens":
        base.config.tie_word_embeddings = True
        base.tie_weights()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", target], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of tied weights
        model = apply_patch(peft.get_peft_model(base, config))
        before, unread = call(model, tiny_batch(base)), call(model, tiny_batch(base))
        before.logits.sum()
        model.merge_adapter()
    assert before.logits.isfinite().all()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        unread.logits.sum()
    merged = call(model, tiny_batch(base))
    model.unmerge_adapter()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        merged.logits.sum()


def test_adapters_that_peft_unmerges_when_the_head_is_called_are_fused() -> None:
    base: Any = tiny_model()
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = apply_patch(peft.get_peft_model(base, config))
    batch = tiny_batch(base)
    with model.disable_adapter():
        plain = call(model, batch)
    model.merge_adapter()
    with model.disable_adapter():
        unmerged = call(model, batch)
        assert patch_status(model).fused
        torch.testing.assert_close(unmerged.loss, plain.loss)
        torch.testing.assert_close(unmerged.logits.sum(), plain.logits.sum())
