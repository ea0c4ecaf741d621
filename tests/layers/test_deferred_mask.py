"""Transformers' masks (B, 1, T, T) are not made where attention leaves them out. Their values are
those of the mask that Transformers makes, for whoever reads them.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import FAMILIES, SIZES, WARNINGS, Calls, make_batch, make_model, seen_masks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_step import step

from liger_patch import apply_patch
from liger_patch.layers import deferred_mask, masked_attention
from liger_patch.layers.deferred_mask import DeferredMask

pytestmark = WARNINGS
TOKENS = 512


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, served=True)


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            each.untyped_storage().nbytes() // each.itemsize
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and not isinstance(each, DeferredMask)
        ]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


def long_batch(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (1, TOKENS), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        places = [torch.arange(n) for n in (200, 1, TOKENS - 201)]
        batch["position_ids"] = torch.cat(places)[None]
    if kind.startswith("padded"):
        batch["attention_mask"] = torch.ones_like(ids)
        padding = slice(-20, None) if kind == "padded" else slice(20)  # so few stay in the batch
        batch["attention_mask"][:, padding] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
        batch["labels"][:, 20] = -100
    return batch


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant", "not"])
@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "padded left"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_tensor_of_a_mask_is_made(
    model_type: str,
    kind: str,
    checkpointing: bool | None,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []

    def served(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        return (query * (key * value).repeat_interleave(groups, 1)).transpose(1, 2)

    def sdpa(*states: Tensor, attn_mask: Tensor | None, **_: Any) -> Tensor:
        given.append(attn_mask)
        return served(*states).transpose(1, 2)

    model, batch = apply_patch(make_model(model_type), layers=["attention"]), long_batch(kind)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    # PyTorch's own make such tensors on a CPU
    monkeypatch.setattr(masked_attention, "segment_attention", served)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(masked_attention, "SDPA", sdpa)
    with Largest() as largest:
        model(**batch).loss.backward()
    assert calls.made == 0
    assert given == [None] * len(given)
    assert 0 < largest.numbers < TOKENS * TOKENS
    if checkpointing is not None or (kind, model_type) == ("plain", "llama"):  # that has none
        return
    monkeypatch.setattr(deferred_mask, "may_serve_flash_attention", lambda *_: False)
    with Largest() as largest, torch.no_grad():
        model(**batch)
    assert largest.numbers >= TOKENS * TOKENS


@pytest.mark.parametrize("more", [0, 1])
def test_masks_of_few_numbers_are_made(
    more: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_mask, "LEAST_NUMBERS", TOKENS * TOKENS + more)
    segments, deferred = DeferredMask.segments, []
    monkeypatch.setattr(
        DeferredMask, "segments", lambda *given: deferred.append(1) or segments(*given)
    )
    model = apply_patch(make_model("llama"), layers=["attention"])
    model(**long_batch("packed"))
    assert (calls.read, len(deferred)) == (1, 1 - more)


@pytest.mark.parametrize("name", deferred_mask.NEED_MASKS)
def test_masks_that_attention_needs_are_made_at_once(name: str, calls: Calls) -> None:
    model = apply_patch(make_model("mistral"), layers=["attention"])
    setattr(model.config, name, 0.5)
    with seen_masks(model) as seen:
        step(model, make_batch("packed"))
    assert [type(mask) for mask in seen] == [Tensor] * 2


def make_mask(model_type: str = "mistral", kind: str = "packed") -> tuple[Any, Tensor]:
    """Return a deferred mask of a model, and the one that it stands for."""
    model, batch = make_model(model_type), make_batch(kind)
    with seen_masks(model) as seen:
        model(**batch)
        apply_patch(model, layers=["attention"])(**batch)
    own, mask = seen[0], seen[2]
    assert (type(own), type(mask)) == (Tensor, DeferredMask)
    assert mask.value is None
    return mask, own


READS: dict[str, Callable[[Tensor], Any]] = {
    "numbers": lambda mask: mask.tolist(),
    "numpy": lambda mask: mask.numpy().tolist(),
    "text": repr,
    "a slice": lambda mask: mask[:, :, 3:9, :7].tolist(),
    "a sum": lambda mask: mask.sum().item(),
    "a method": lambda mask: mask.logical_not().tolist(),
    "an operator": lambda mask: (~mask).tolist(),
    "a cast": lambda mask: mask.to(torch.float32).tolist(),
    "a function": lambda mask: torch.where(mask, 0.0, 1.0).tolist(),
    "strides": lambda mask: mask.stride(),
    "a copy": lambda mask: copy.deepcopy(mask).tolist(),
    "a pickle": lambda mask: pickle.loads(pickle.dumps(mask)).tolist(),
    "a file": lambda mask: _saved(mask).tolist(),
    "an iteration": lambda mask: [row.sum().item() for row in mask],
    "a comparison": lambda mask: torch.equal(mask, mask.clone()),
    "below autograd": lambda mask: torch.ops.aten.bitwise_not(mask).tolist(),
}


def _saved(mask: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_a_mask_gets_its_values(read: Callable[[Tensor], Any], calls: Calls) -> None:
    mask, own = make_mask()
    assert read(mask) == read(own)
    assert calls.made == 1
    assert read(mask) == read(own)


def test_sizes_are_answered_without_values(calls: Calls) -> None:
    mask, own = make_mask()
    for each in (mask, mask.detach()):
        assert (each.shape, each.dtype, each.device) == (own.shape, own.dtype, own.device)
        assert (each.dim(), each.size(-1), each.numel()) == (4, own.size(-1), own.numel())
        assert (each.requires_grad, each.is_floating_point()) == (False, False)
        assert isinstance(each, Tensor)
    assert calls.made == 0


def test_sdpa_takes_a_deferred_mask(calls: Calls) -> None:
    mask, own = make_mask()
    states = [torch.randn(2, 4, own.shape[-1], 16) for _ in range(3)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(sdpa(*states, attn_mask=mask), sdpa(*states, attn_mask=own))


def make_with_source(kind: str) -> tuple[Any, Tensor]:
    """Return a deferred mask of a model, and the caller's tensor that it is made of."""
    batch, name = make_batch(kind), "position_ids"
    if kind == "padded":
        name = "attention_mask"
        batch[name] = batch[name].bool()  # Transformers copies any other
    model = apply_patch(make_model("mistral"), layers=["attention"])
    with seen_masks(model) as seen:
        model(**batch)
    if name not in seen[0].tensors:
        pytest.skip("this version of Transformers does not use the positions")
    assert seen[0].value is None
    return seen[0], batch[name]


@pytest.mark.parametrize("read", [Tensor.tolist, lambda mask: mask.segments(2, None)])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_mask_read_after_its_source_changed_is_an_error(
    kind: str, read: Callable[[Any], Any], calls: Calls
) -> None:
    mask, source = make_with_source(kind)
    source[:, 1] = 0
    with pytest.raises(RuntimeError, match=r"which it is made of, was changed in place"):
        read(mask)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_mask_read_before_its_source_changed_keeps_its_values(kind: str, calls: Calls) -> None:
    mask, source = make_with_source(kind)
    values = mask.tolist()
    source[:, 1] = 0
    assert mask.tolist() == values


@pytest.mark.parametrize("checkpointing", [True, False], ids=["reentrant", "not"])
def test_positions_may_change_before_the_backward_pass(checkpointing: bool, calls: Calls) -> None:
    """Its layers keep what their mask says."""
    model = make_model("mistral").double()
    model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model.enable_input_require_grads()

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


def test_masks_of_inference_tensors_are_made_at_once(calls: Calls) -> None:
    batch = make_batch("padded")
    with torch.inference_mode():
        batch["attention_mask"] = batch["attention_mask"].bool()
    model = apply_patch(make_model("mistral"), layers=["attention"])
    with seen_masks(model) as seen:
        model(**batch)
    assert [type(mask) for mask in seen] == [Tensor] * 2


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


def test_masks_of_32_bits_and_other_devices_are_made_at_once() -> None:
    model = apply_patch(make_model("mistral"), layers=["attention"])
    with seen_masks(model) as seen:
        model(**make_batch("packed"))
    assert [type(mask) for mask in seen] == [Tensor] * 2
