"""Attention of packed sequences and sliding windows computes without a mask what the model's own
computes with it. On a CPU, the reference stands for flash attention.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_models import (
    CONFIGS,
    FAMILIES,
    TOKENS,
    WARNINGS,
    WINDOWS,
    Calls,
    causal_mask,
    make_batch,
    make_model,
    seen_masks,
)
from attention_models import served_calls as served_calls
from slow_cases import pairwise, slow_but
from torch import Tensor
from training_step import assert_right, call, gradients, step, widened, with_checkpoints
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral.modeling_mistral import MistralAttention

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.layers import masked_attention
from liger_patch.layers.masked_attention import DeferredMask
from liger_patch.layers.replace import count_layers

pytestmark = WARNINGS


KINDS = ["plain", "ones", "packed", "padded", "padded left", "little padded", "little padded left"]
ENDS = {  # of sequences of both rows together; padding that stays on the left is one of its own
    "packed": [0, 7, 27, 40, 70, 71, 80],
    "padded": [0, TOKENS, 2 * TOKENS - 10],
    "padded left": [0, TOKENS, 2 * TOKENS - 10],
    "little padded left": [0, TOKENS, TOKENS + 4, 2 * TOKENS],
}


@pytest.mark.parametrize(
    ("checkpointing", "kind", "model_type"), pairwise([None, True, False], KINDS, FAMILIES)
)
def test_a_step_is_the_models_own(
    model_type: str, kind: str, checkpointing: bool | None, calls: Calls
) -> None:
    """Padding without a label is left out. Where it stays, it is the end of its sequence, or a
    sequence before it.
    """
    model, batch = make_model(model_type), make_batch(kind)
    truth = step(widened(model), batch)
    with_checkpoints(model, checkpointing)
    calls.own.clear()
    own = step(model, batch)
    assert any(calls.own) == (kind not in ("plain", "ones") or any(WINDOWS[model_type]))
    calls.own.clear()
    apply_patch(model, layers=["attention"])
    ours = step(model, batch)
    windows = [each for each in WINDOWS[model_type] if each is not None or kind in ENDS]
    passes = 1 if checkpointing is None else 2
    assert [found.window for found in calls.flash[: len(windows)]] == windows
    assert len(calls.flash) == passes * len(windows)
    assert calls.own == [False] * (passes * (2 - len(windows)))
    for found in calls.flash:
        ends = None if found.cu_seqlens is None else found.cu_seqlens.tolist()
        assert ends == ENDS.get(kind)
        assert kind != "packed" or found.max_seqlen == 30
    if "padded" not in kind:
        assert calls.read == len({*windows})  # a mask for each kind of layer
    assert calls.made == 0
    assert_right(ours, own, truth)


def test_a_batch_too_large_for_pytorchs_flash_attention_is_warned_of(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("plain")
    monkeypatch.setattr(masked_attention, "MOST_NUMBERS", 1)
    monkeypatch.setattr(masked_attention, "may_serve_flash_attention", lambda *_: True)
    with pytest.warns(UserWarning, match="queries. Over more than 1, gradients of PyTorch"):
        step(model, batch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch)


def test_float64_keeps_its_dtype_under_autocast(calls: Calls) -> None:
    """Autocast casts all floats but these."""
    model, batch = make_model("mistral").double(), make_batch("plain")
    del batch["labels"]
    with torch.autocast("cpu", torch.bfloat16):
        own = model(**batch).logits
        ours = apply_patch(model, layers=["attention"])(**batch).logits
    assert len(calls.flash) == 2
    torch.testing.assert_close(ours, own)


def test_status_names_attention_that_keeps_its_masks() -> None:
    model = apply_patch(make_model("mistral", "eager"), layers=["attention"])
    expected = "2 attention with masks: attn_implementation='eager' is not 'sdpa'"
    assert expected in str(patch_status(model))
    model.set_attn_implementation("sdpa")
    assert "with masks" not in str(patch_status(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_mask_of_two_calls_is_the_same_when_a_layer_runs_again(
    reentrant: bool, calls: Calls
) -> None:
    """A policy with labels and its reference without them, in a loop with one mask."""
    model, batch = make_model("mistral"), make_batch("plain")
    mask = causal_mask(torch.ones_like(batch["input_ids"]))
    mask[1, :, 20:, :20] = False
    batch["attention_mask"] = mask
    truth, own = step(widened(model), batch), step(model, batch)
    reference_model = apply_patch(copy.deepcopy(model), layers=["attention"])
    apply_patch(with_checkpoints(model, reentrant), layers=["attention"])
    loss = call(model, batch).loss
    with torch.no_grad():
        reference_model(batch["input_ids"], attention_mask=mask)
    assert_right({"loss": loss.detach(), **gradients(model, loss)}, own, truth)
    assert (len(calls.flash), calls.read) == (6, 2)


def test_a_mask_of_the_callers_that_is_causal_is_left_out(calls: Calls) -> None:
    model, batch = apply_patch(make_model("llama"), layers=False), make_batch("plain")
    own = step(model, batch)
    calls.own.clear()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    ours = step(apply_patch(model, layers=["attention"]), batch | {"attention_mask": mask})
    assert (calls.flash, calls.own, calls.read) == ([], [False, False], 1)
    torch.testing.assert_close(ours, own, rtol=0, atol=0)


def _in_place(mask: Tensor) -> Tensor:
    mask[..., 20:, :20] = False
    return mask


def _unseen(mask: Tensor) -> Tensor:
    mask.data[..., 20:, :20] = False  # PyTorch counts no write
    return mask


@pytest.mark.parametrize(
    "changed", [_in_place, _unseen, lambda mask: _in_place(copy.deepcopy(mask))]
)
def test_a_mask_that_changes_is_read_again(
    changed: Callable[[Tensor], Tensor], calls: Calls
) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("plain")
    wide = widened(revert_patch(copy.deepcopy(model)))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    step(model, batch | {"attention_mask": mask})
    assert not vars(mask)
    batch |= {"attention_mask": changed(mask)}
    packed = step(model, batch)
    assert calls.read == 2
    assert [found.max_seqlen for found in calls.flash] == [20, 20]
    assert_right(packed, step(revert_patch(model), batch), step(wide, batch))


def test_a_mask_that_an_evaluation_has_read_can_train(calls: Calls) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("plain")
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    mask[..., 20:, :20] = False
    with torch.inference_mode():
        model(**batch | {"attention_mask": mask})
    assert not any(found.cu_seqlens.is_inference() for found in calls.flash)
    step(model, batch | {"attention_mask": mask})
    assert len(calls.flash) == 4


def _dropout(model: Any, batch: Any, patches: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def _replaced(table: Any, name: str, patches: Any, replace: Callable[..., None]) -> list[int]:
    own, ran = table[name] if isinstance(table, dict) else getattr(table, name), []
    replace(table, name, lambda *args, **options: ran.append(1) or own(*args, **options))
    return ran


def _another_sdpa(model: Any, batch: Any, patches: Any) -> list[int]:
    """As SageAttention's users do."""
    return _replaced(torch.nn.functional, "scaled_dot_product_attention", patches, patches.setattr)


def _another_function(model: Any, batch: Any, patches: Any) -> list[int]:
    """Of another library, in Transformers' table."""
    table = ALL_ATTENTION_FUNCTIONS._local_mapping
    patches.setitem(table, "sdpa", masked_attention.sdpa_attention_forward)
    return _replaced(table, "sdpa", patches, patches.setitem)


KEEP_THEIR_MASKS: dict[str, Callable[[Any, Any, Any], list[int] | None]] = {
    "float mask": lambda _, batch, __: batch.update(
        attention_mask=torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.float32)
    ),
    "dropout": _dropout,
    "inference mode": lambda *_: None,
    "replaced SDPA": _another_sdpa,
    "function of another library": _another_function,
    "eager": lambda model, *_: model.set_attn_implementation("eager"),
    "flex_attention": lambda model, *_: model.set_attn_implementation("flex_attention"),
    "inner model": lambda *_: None,
    "inner model, checkpoints": lambda model, *_: model.gradient_checkpointing_enable(
        {"use_reentrant": False}
    ),
}


@pytest.mark.parametrize(
    "kind", slow_but({*KEEP_THEIR_MASKS} - {"flex_attention"}, [*KEEP_THEIR_MASKS])
)
def test_other_calls_keep_their_mask(
    kind: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = apply_patch(make_model("mistral"), layers=["attention"]), make_batch("plain")
    ran = KEEP_THEIR_MASKS[kind](model, batch, monkeypatch)
    if kind.startswith("inner"):
        model.model(batch["input_ids"]).last_hidden_state.sum().backward()
    else:
        quiet = {"inference mode": torch.inference_mode, "flex_attention": torch.no_grad}
        with quiet.get(kind, nullcontext)():
            call(model, batch)
    assert (calls.flash, calls.read) == ([], calls.made)
    assert ran is None or len(ran) == 2
    if kind not in ("eager", "flex_attention"):
        assert calls.own == [True, True] * (1 + ("checkpoints" in kind))


def make_mask() -> tuple[Any, Tensor]:
    """Return a mask that was not made, and the one that it stands for."""
    model, batch = make_model("mistral"), make_batch("packed")
    with seen_masks(model) as seen:
        model(**batch)
        apply_patch(model, layers=["attention"])(**batch)
    own, mask = seen[0], seen[2]
    assert (type(own), type(mask)) == (Tensor, DeferredMask)
    return mask, own


READS: dict[str, Callable[[Tensor], Any]] = {
    "numbers": lambda mask: mask.tolist(),
    "text": repr,
    "a slice": lambda mask: mask[:, :, 3:9, :7].tolist(),
    "a cast": lambda mask: mask.to(torch.float32).tolist(),
    "a function": lambda mask: torch.where(mask, 0.0, 1.0).tolist(),
    "a pickle": lambda mask: pickle.loads(pickle.dumps(mask)).tolist(),
    "below autograd": lambda mask: torch.ops.aten.bitwise_not(mask).tolist(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_a_mask_gets_its_values(read: Callable[[Tensor], Any], calls: Calls) -> None:
    mask, own = make_mask()
    assert read(mask) == read(own)
    assert calls.made == 1
    assert read(mask) == read(own)


def test_sizes_of_a_mask_are_answered_without_values(calls: Calls) -> None:
    mask, own = make_mask()
    for each in (mask, mask.detach()):
        assert (each.shape, each.dtype, each.device) == (own.shape, own.dtype, own.device)
        assert (each.dim(), each.size(-1), each.numel()) == (4, own.size(-1), own.numel())
        assert (each.requires_grad, each.is_floating_point()) == (False, False)
    assert calls.made == 0


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("changed", [False, True])
def test_a_model_that_reads_its_mask_trains_as_before(
    changed: bool, layer: int, calls: Calls
) -> None:
    """A hook that reads it, or that hides a key from all other tokens."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        assert mask.diagonal(dim1=2, dim2=3).all()
        if changed:
            mask[..., 20:, 9] = False

    model, batch = make_model("mistral").double(), make_batch("packed")
    model.model.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
    own = step(model, batch)
    calls.own.clear()
    ours = step(apply_patch(model, layers=["attention"]), batch)
    torch.testing.assert_close(ours, own)
    assert calls.own == [True] * (2 - layer) * changed


@pytest.mark.parametrize("checkpointing", [True, False], ids=["reentrant", "not"])
def test_positions_may_change_before_the_backward_pass(checkpointing: bool, calls: Calls) -> None:
    """Layers keep what their mask says."""
    model = with_checkpoints(make_model("mistral").double(), checkpointing)

    def changed_step() -> dict[str, Tensor]:
        batch = make_batch("packed")
        model.zero_grad()
        loss = model(**batch).loss
        batch["position_ids"].zero_()
        loss.backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    own = changed_step()
    apply_patch(model, layers=["attention"])
    torch.testing.assert_close(changed_step(), own)
    assert calls.made == 0


@pytest.mark.parametrize("names", [["attention"], ["rotary"], ["attention", "rotary"]])
def test_either_half_of_an_attention_is_replaced(names: list[str], calls: Calls) -> None:
    model, batch = make_model("mistral"), make_batch("packed")
    truth, own = step(widened(model), batch), step(model, batch)
    apply_patch(model)
    apply_patch(model, layers=names)
    expected = dict.fromkeys(count_layers(model), 0) | dict.fromkeys(names, 2)
    assert count_layers(model) == expected
    again = pickle.loads(pickle.dumps(model))
    assert count_layers(again) == expected
    for each in (model, again, copy.deepcopy(model)):
        calls.flash.clear()
        assert_right(step(each, batch), own, truth)
        assert len(calls.flash) == 2 * ("attention" in names)
    revert_patch(model)
    assert type(model.model.layers[0].self_attn) is MistralAttention


def test_generation_is_the_models_own(calls: Calls) -> None:
    model, prompt = make_model("mistral").eval(), make_batch("plain")["input_ids"]
    how = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    own = model.generate(prompt, **how)
    ours = apply_patch(model).generate(prompt, **how)
    torch.testing.assert_close(ours, own)
    assert len(calls.flash) == 2  # the prompt


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "padded left"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_step_on_a_gpu_is_no_worse(
    model_type: str, kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_model(model_type), make_batch(kind)
    truth = step(widened(model), batch)
    model, batch = model.cuda(), {name: value.cuda() for name, value in batch.items()}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    eager = step(model, batch, autocast=True)
    found = Calls(monkeypatch, served=False)
    apply_patch(model, layers=["attention"])
    ours = step(model, batch, autocast=True)
    masked = [each for each in WINDOWS[model_type] if each is not None or kind in ENDS]
    assert len(found.flash) == len(masked) * (1 + checkpointing)
    assert not any(found.own)
    assert_right(ours, eager, truth, torch.bfloat16)
