"""Transformers' masks (B, 1, T, T) are not made where attention leaves them out: of which
backbones, in which calls, for which mask functions.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from attention_models import SIZES, WARNINGS, Calls, make_batch, make_model, seen_masks
from attention_models import served_calls as served_calls
from tiny_models import tiny_model
from torch import Tensor
from trainers import LargestTensor
from training_step import step, with_checkpoints
from transformers import LlamaConfig, masking_utils
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral import modeling_mistral

from liger_patch import apply_patch, revert_patch
from liger_patch.kernels.segments import segments_of
from liger_patch.layers import masked_attention, masks
from liger_patch.layers.masked_attention import DeferredMask, UsedTokens

pytestmark = WARNINGS
TOKENS = 512


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


@pytest.mark.parametrize(
    ("model_type", "kind", "checkpointing"),
    [
        ("llama", "packed", False),
        ("llama", "padded left", None),
        ("mistral", "plain", True),
        ("gemma3_text", "plain", None),
        ("gemma3_text", "packed", True),
        ("gemma3_text", "padded", False),
        ("gemma3", "packed", None),
        ("gemma3", "padded", True),
        ("qwen2", "packed", None),
    ],
)
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

    if model_type == "gemma3" and transformers.__version__.startswith("5.0."):
        pytest.skip("it trains with images alone")
    model = tiny_model(model_type).train() if model_type == "gemma3" else make_model(model_type)
    model.config.get_text_config().use_cache = False
    apply_patch(model, layers=["attention"])
    batch = long_batch(kind)
    with_checkpoints(model, checkpointing)
    # PyTorch's own make such tensors on a CPU
    monkeypatch.setattr(masked_attention, "segment_attention", served)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(masked_attention, "SDPA", sdpa)
    with LargestTensor() as largest:
        model(**batch).loss.backward()
    assert calls.made == 0
    assert given == [None] * len(given)
    assert 0 < largest.elements < TOKENS * TOKENS
    if checkpointing is None:
        monkeypatch.setattr(masks, "may_serve_flash_attention", lambda *_: False)
        with LargestTensor() as largest, torch.no_grad():
            model(**batch)
        assert largest.elements >= TOKENS * TOKENS


@pytest.mark.parametrize("more", [0, 1])
def test_masks_of_few_numbers_are_made(
    more: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "LEAST_NUMBERS", TOKENS * TOKENS + more)
    model = apply_patch(make_model("llama"), layers=["attention"])
    with seen_masks(model) as seen:
        model(**long_batch("packed"))
    assert [type(mask) for mask in seen] == [Tensor if more else DeferredMask] * 2


@pytest.mark.parametrize("name", masks.NEED_MASKS)
def test_masks_that_attention_needs_are_made_at_once(name: str, calls: Calls) -> None:
    model = apply_patch(make_model("mistral"), layers=["attention"])
    setattr(model.config, name, 0.5)
    with seen_masks(model) as seen:
        step(model, make_batch("packed"))
    assert [type(mask) for mask in seen] == [Tensor] * 2


def _compiled_layer(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


def _compiled_forward(model: Any) -> None:
    layer = model.model.layers[1]
    layer.forward = torch.compile(layer.forward, backend="eager")


def _own_forwards(of: Callable[[Any], list[Any]]) -> Callable[[Any], None]:
    """As those of Transformers' tensor-parallel plan, and of norms that it takes from the Hub."""

    def change(model: Any) -> None:
        for module in of(model.model.layers[1]):
            module.forward = functools.partial(type(module).forward, module)

    return change


CHANGES: dict[str, tuple[Callable[[Any], None], type]] = {  # of a layer, and the masks then
    "compiled layer": (_compiled_layer, Tensor),
    "compiled forward": (_compiled_forward, Tensor),
    "compiled attention": (
        lambda model: model.model.layers[1].self_attn.compile(backend="eager"),
        Tensor,
    ),
    "layer": (_own_forwards(lambda layer: [layer]), Tensor),
    "attention": (_own_forwards(lambda layer: [layer.self_attn]), Tensor),
    "compiled norm": (
        lambda model: model.model.layers[1].input_layernorm.compile(backend="eager"),
        DeferredMask,
    ),
    "others": (
        _own_forwards(lambda each: [each.input_layernorm, each.self_attn.q_proj, each.mlp]),
        DeferredMask,
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("name", CHANGES)
def test_masks_are_real_where_a_compiled_or_replaced_forward_is_given_them(
    name: str, calls: Calls
) -> None:
    """And deferred where other modules have such a forward."""
    change, expected = CHANGES[name]
    model, batch = make_model("mistral").double(), make_batch("packed")
    own, seen = step(model, batch), []
    change(apply_patch(model, layers=["attention"]))
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(type(kwargs["attention_mask"])), with_kwargs=True
    )
    ours = {name.replace("_orig_mod.", ""): value for name, value in step(model, batch).items()}
    torch.testing.assert_close(ours, own)
    assert seen == [expected]
    torch._dynamo.reset()


def test_only_calls_of_the_patched_model_defer(calls: Calls) -> None:
    """Not those of an unpatched model in another thread at the same time."""
    model, other, batch = make_model("mistral"), make_model("mistral"), make_batch("packed")
    apply_patch(model, layers=["attention"])
    assert type(other.model) is not type(model.model)
    with seen_masks(other) as seen, seen_masks(model) as ours:

        def call_other(*_: Any) -> None:
            thread = threading.Thread(target=lambda: other(**batch))
            thread.start()
            thread.join()

        handle = model.model.layers[0].register_forward_pre_hook(call_other)
        model(**batch)
        handle.remove()
        model.model(batch["input_ids"])
        assert [type(mask) for mask in seen] == [Tensor] * 2
        assert [type(mask) for mask in ours] == [DeferredMask] * 2 + [Tensor] * 2


def test_the_backbone_gets_its_class_back() -> None:
    model = apply_patch(make_model("llama"))
    derived = type(model.model)
    assert derived is not LlamaModel
    assert issubclass(derived, LlamaModel)
    assert inspect.signature(derived.forward) == inspect.signature(LlamaModel.forward)
    again = pickle.loads(pickle.dumps(model))
    assert type(again.model) is type(copy.deepcopy(model).model) is derived
    assert type(apply_patch(model, layers=["rms_norm"]).model) is LlamaModel
    assert type(apply_patch(model, layers=["attention"]).model) is derived
    assert type(revert_patch(model).model) is LlamaModel
    assert type(apply_patch(make_model("llama"), layers=False).model) is LlamaModel


def test_makers_of_masks_are_found_in_functions_within_a_forward() -> None:
    """As in those of dots.llm1 in later versions of Transformers."""
    model = apply_patch(tiny_model("dots1"), layers=["attention"])
    assert getattr(type(model.model), masks.DEFERS_MASKS)


@pytest.mark.parametrize("replaced", ["maker of a user", "function of a library in the table"])
def test_a_maker_of_masks_that_somebody_has_replaced_runs(
    replaced: str, calls: Calls, record: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply_patch(make_model("mistral"), layers=["attention"])
    if replaced == "maker of a user":
        ran = record(modeling_mistral, "create_sliding_window_causal_mask")
    else:
        own, ran = masking_utils.sdpa_mask, []
        table = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
        monkeypatch.setitem(table, "sdpa", lambda **options: ran.append(1) or own(**options))
    with seen_masks(model) as seen:
        model(**make_batch("plain"))
    assert len(ran) == 1
    assert [type(mask) for mask in seen] == [Tensor] * 2


def test_classes_whose_code_is_not_transformers_stay() -> None:
    class Own(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = make_model("llama")
    model.model.__class__ = Own
    apply_patch(model, layers=["attention"])
    assert type(model.model) is Own
    assert masks.mask_deferring_class(Own(LlamaConfig(**SIZES))) is None


def ask(function: Callable[..., Any], mask_function: Callable[..., Any], **options: Any) -> Any:
    """Call ``sdpa_mask`` as Transformers does, with the arguments that its version has."""
    rows, tokens = options.pop("rows", 2), options.pop("tokens", 24)
    names = inspect.signature(masking_utils.sdpa_mask).parameters
    if "cache_position" in names:
        options["cache_position"] = torch.arange(tokens)
    else:
        options["q_length"], options["device"] = tokens, torch.device("cpu")
    given = {"batch_size": rows, "kv_length": tokens, "dtype": torch.bfloat16, **options}
    return function(mask_function=mask_function, **given)


def packed(base: Callable[..., Any], sequences: Tensor, positions: Tensor) -> Callable[..., Any]:
    """Return what Transformers makes for packed rows: its later versions use the positions."""
    make = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if make is not None:
        return make(base, positions, sequences)
    return masking_utils.and_masks(base, masking_utils.packed_sequence_mask_function(sequences))


BASES: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (masking_utils.causal_mask_function, None),
    "window": (masking_utils.sliding_window_causal_mask_function(7), 7),
    "chunks": (masking_utils.chunked_causal_mask_function(9, torch.tensor([0, 4])), 9),
}


def masks_of(
    mask_function: Callable[..., Any], used: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the mask that a backbone gets, and Transformers' own."""
    may_defer, found = options.pop("may_defer", True), UsedTokens(lambda: used)

    def described(**given: Any) -> Any:
        return masks.deferred_sdpa_mask(lambda: may_defer, found, given)

    ours = ask(described, mask_function, **options)
    return ours, ask(masking_utils.sdpa_mask, mask_function, **options)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("base", BASES)
def test_segments_are_those_of_the_mask(base: str, seed: int, calls: Calls) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(2, 24, generator=generator) < 0.2
    starts[:, 0] = True
    place = torch.arange(24).expand(2, -1)
    positions = place - torch.where(starts, place, 0).cummax(-1).values
    function, window = BASES[base]
    options: dict[str, Any] = {"local_size": window, "allow_is_causal_skip": True}
    if seed % 3 == 0:
        function = packed(function, starts.cumsum(-1), positions)
        options["allow_is_causal_skip"] = False
    if seed % 3 == 1:
        options["attention_mask"] = (place >= torch.tensor([[0], [4]])) & (place < 20)
    if seed % 3 == 2:
        options["attention_mask"] = torch.rand(2, 24, generator=generator) < 0.9
    kept = options.get("attention_mask", torch.ones(2, 24, dtype=torch.bool))
    for used in (None, kept):
        mask, own = masks_of(function, used, **options)
        expected = segments_of(own[:, 0], 2, used)
        assert isinstance(mask, DeferredMask)
        assert str(mask.segments()) == str(expected)
        assert (mask.value is None) == (expected is not None)
        assert torch.equal(mask[:, 0][kept], own[:, 0][kept])


CAUSAL = masking_utils.causal_mask_function
NO_INTERVALS = {
    "a sequence that goes on": (torch.tensor([[0] * 8 + [1] * 8 + [0] * 8]), torch.arange(24)),
    "positions that jump": (torch.zeros(1, 24).long(), torch.arange(24).roll(3)),
}


@pytest.mark.parametrize("kind", NO_INTERVALS)
def test_sequences_that_are_no_intervals_keep_their_mask(kind: str, calls: Calls) -> None:
    sequences, positions = NO_INTERVALS[kind]
    if kind == "positions that jump" and not hasattr(
        masking_utils, "packed_sequence_compatibility_function"
    ):
        pytest.skip("this version of Transformers does not use the positions")
    function = packed(CAUSAL, sequences, positions[None])
    options = {"rows": 1, "allow_is_causal_skip": False}
    mask, own = masks_of(function, **options)
    assert isinstance(mask, DeferredMask)
    assert mask.segments() is segments_of(own[:, 0], 1) is None
    assert torch.equal(mask, own)


def _users(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


HALVES = masking_utils.packed_sequence_mask_function(torch.arange(24).expand(2, -1) // 12)
OTHERS: dict[str, dict[str, Any]] = {
    "a user's": {"mask_function": _users},
    "a user's, combined": {"mask_function": masking_utils.and_masks(CAUSAL, _users)},
    "a union": {"mask_function": masking_utils.or_masks(CAUSAL, _users)},
    "bidirectional": {"mask_function": masking_utils.bidirectional_mask_function},
    "packed twice": {"mask_function": masking_utils.and_masks(CAUSAL, HALVES, HALVES)},
    "by vmap": {"mask_function": CAUSAL, "use_vmap": True},
    "fewer queries": {"mask_function": CAUSAL, "kv_length": 30},
    "whoever gets it reads memory": {"mask_function": CAUSAL, "may_defer": False},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_masks_are_made_at_once(kind: str, calls: Calls) -> None:
    mask, own = masks_of(**{"allow_is_causal_skip": False, **OTHERS[kind]})
    assert type(mask) is Tensor
    assert torch.equal(mask, own)


@pytest.mark.parametrize("attention_mask", [None, torch.ones(2, 24, dtype=torch.bool)])
def test_no_mask_stays_none(attention_mask: Tensor | None, calls: Calls) -> None:
    assert masks_of(CAUSAL, attention_mask=attention_mask) == (None, None)
