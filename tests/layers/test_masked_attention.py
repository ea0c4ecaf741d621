"""Attention of packed sequences and sliding windows computes without a mask what the model's own
computes with it. On a CPU, the reference stands for flash attention.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from torch import Tensor
from training_step import Step, call, gradients, joined, step, widened
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral.modeling_mistral import MistralAttention

from liger_patch import apply_patch, revert_patch
from liger_patch.kernels import reference, segments
from liger_patch.layers import masked_attention
from liger_patch.layers.replace import count_layers
from liger_patch.patch.forward import record_of

TOKENS, WINDOW = 40, 12
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma3_text": Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "llama": LlamaConfig(**SIZES),
}
SLIDING = {"gemma3_text": 1, "mistral": 2, "llama": 0}  # of the two layers
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
]


def make_model(model_type: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[model_type])
    config.use_cache = False  # as Trainer has it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train()


def make_batch(kind: str) -> dict[str, Tensor]:
    """Rows of tokens: two of one sequence each, or packed with three, or with padding."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, SIZES["vocab_size"], (2, TOKENS), generator=generator)
    batch = {"input_ids": input_ids, "labels": input_ids.masked_fill(input_ids % 3 == 0, -100)}
    if kind == "packed":
        lengths = [[7, 20, 13], [30, 1, 9]]
        places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        # a patched model does not predict these, whatever the labels
        labels = batch["labels"].masked_fill(places == 0, -100)
        return batch | {"position_ids": places, "labels": labels}
    if kind == "ones":
        return batch | {"attention_mask": torch.ones_like(input_ids)}
    if kind == "padded":
        mask = torch.ones_like(input_ids)
        mask[1, 30:] = 0
        return batch | {
            "attention_mask": mask,
            "labels": batch["labels"].masked_fill(mask == 0, -100),
        }
    return batch


class Calls:
    """The calls of flash attention and of PyTorch's SDPA, and the masks that were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, served: bool) -> None:
        self.flash: list[segments.Segments] = []
        self.own: list[bool] = []  # whether there was a mask
        self.read = 0
        own = torch.nn.functional.scaled_dot_product_attention

        def flash(query, key, value, found, scale=None) -> Tensor:
            self.flash.append(found)
            if served:
                return reference.segment_attention(query, key, value, found, scale)
            return segments.segment_attention(query, key, value, found, scale)

        def counted(*states: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
            self.own.append(attn_mask is not None)
            return own(*states, attn_mask=attn_mask, **options)

        def read(mask: Tensor, rows: int, used: Tensor | None) -> Any:
            self.read += 1
            return segments.segments_of(mask, rows, used)

        monkeypatch.setattr(masked_attention, "segment_attention", flash)
        monkeypatch.setattr(masked_attention, "segments_of", read)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        if served:
            monkeypatch.setattr(masked_attention, "serves_flash_attention", lambda *_: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, served=True)


def assert_right(ours: Step, own: Step, truth: Step) -> None:
    truth, own, ours = joined(truth, own, ours)
    assert_no_worse(ours, own, truth, torch.float32)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant", "not"])
@pytest.mark.parametrize("kind", ["plain", "ones", "packed"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_step_is_the_models_own(
    model_type: str, kind: str, checkpointing: bool | None, calls: Calls
) -> None:
    model, batch = make_model(model_type), make_batch(kind)
    truth = step(widened(model), batch)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    calls.own.clear()
    own = step(model, batch)
    assert any(calls.own) == (kind == "packed" or SLIDING[model_type] > 0)
    calls.own.clear()
    apply_patch(model, layers=["attention"])
    ours = step(model, batch)
    masked = 2 if kind == "packed" else SLIDING[model_type]
    passes = 1 if checkpointing is None else 2
    assert len(calls.flash) == passes * masked
    assert len(calls.own) == passes * (2 - masked)
    assert not any(calls.own)
    # a mask for each kind of layer
    assert calls.read == (min(1, masked) if model_type != "gemma3_text" else masked)
    assert_right(ours, own, truth)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_windows_and_sequences_are_those_of_the_mask(model_type: str, calls: Calls) -> None:
    model = apply_patch(make_model(model_type), layers=["attention"])
    step(model, make_batch("packed"))
    ends = torch.tensor([0, 7, 27, 40, 70, 71, 80], dtype=torch.int32)
    windows = {"gemma3_text": [WINDOW, None], "mistral": [WINDOW] * 2, "llama": [None] * 2}
    assert [found.window for found in calls.flash] == windows[model_type]
    for found in calls.flash:
        torch.testing.assert_close(found.ends, ends)
        assert found.longest == 30


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_padding_without_a_label_needs_no_mask(
    model_type: str, checkpointing: bool, calls: Calls
) -> None:
    model, batch = make_model(model_type), make_batch("padded")
    truth, own = step(widened(model), batch), step(model, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.own.clear()
    ours = step(apply_patch(model, layers=["attention"]), batch)
    assert (len(calls.flash), calls.own) == (4 if checkpointing else 2, [])
    ends = torch.tensor([0, TOKENS, TOKENS + 30, 2 * TOKENS], dtype=torch.int32)
    assert all(torch.equal(ends, found.ends) for found in calls.flash)
    assert_right(ours, own, truth)


def test_results_of_other_tokens_than_the_padding_are_the_same(calls: Calls) -> None:
    model, batch = make_model("llama"), make_batch("padded")
    own = apply_patch(model, layers=False)(**batch).logits
    ours = apply_patch(model, layers=["attention"])(**batch).logits
    assert len(calls.flash) == 2
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(torch.as_tensor(ours)[kept], torch.as_tensor(own)[kept])


def _needs_results_of_padding(kind: str, model: Any, batch: dict[str, Tensor]) -> Any:
    if kind == "a label behind padding":  # predicted by the last padded token
        mask = batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        mask[1, :5] = 0
        batch["labels"][1, 5] = 7
    if kind == "a padded label":
        batch["labels"][1, 35] = 7
    if kind == "no labels":
        del batch["labels"]
    return model(**batch)


@pytest.mark.filterwarnings("ignore:liger_patch has no test of LlamaForCausalLM")
@pytest.mark.parametrize(
    "kind",
    ["a label behind padding", "a padded label", "no labels", "own logits", "not tested", "router"],
)
def test_padding_whose_results_are_used_keeps_its_mask(
    kind: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_model("llama"), make_batch("padded")
    apply_patch(model, layers=["attention"])
    if kind == "own logits":
        monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    if kind == "not tested":
        record = record_of(model)
        assert record is not None
        record.tested, record.compared = False, "before"
    if kind == "router":
        model.config.output_router_logits = True
    _needs_results_of_padding(kind, model, batch)
    assert (calls.flash, calls.own, calls.read) == ([], [True, True], 1)


def test_a_mask_with_padding_is_read_again_for_other_labels(calls: Calls) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("padded")
    place = torch.arange(TOKENS)
    mask = batch["attention_mask"].bool()[:, None, None] & (place <= place[:, None])
    batch["attention_mask"] = mask
    model(**batch)
    assert (len(calls.flash), calls.read) == (2, 1)
    model(input_ids=batch["input_ids"], attention_mask=mask)
    assert (len(calls.flash), calls.own, calls.read) == (2, [True, True], 2)


def test_a_mask_of_the_callers_that_is_causal_is_left_out(calls: Calls) -> None:
    model, batch = apply_patch(make_model("llama"), layers=False), make_batch("plain")
    own = step(model, batch)
    calls.own.clear()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    ours = step(apply_patch(model, layers=["attention"]), batch | {"attention_mask": mask})
    assert (calls.flash, calls.own, calls.read) == ([], [False, False], 1)
    torch.testing.assert_close(ours, own, rtol=0, atol=0)


def test_a_mask_that_changes_is_read_again(calls: Calls) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("plain")
    wide = widened(revert_patch(copy.deepcopy(model)))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    step(model, batch | {"attention_mask": mask})
    mask[..., 20:, :20] = False
    batch |= {"attention_mask": mask}
    packed = step(model, batch)
    assert calls.read == 2
    assert [found.longest for found in calls.flash] == [20, 20]
    assert_right(packed, step(revert_patch(model), batch), step(wide, batch))


@pytest.mark.parametrize("kind", ["float mask", "dropout", "inference mode"])
def test_other_calls_keep_their_mask(kind: str, calls: Calls) -> None:
    model, batch = make_model("mistral"), make_batch("plain")
    if kind == "float mask":
        mask = torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.float32)
        batch["attention_mask"] = mask
    if kind == "dropout":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    apply_patch(model, layers=["attention"])
    with torch.inference_mode(kind == "inference mode"):
        call(model, batch)
    assert (calls.flash, calls.own, calls.read) == ([], [True, True], 0)


@pytest.mark.parametrize("attention", slow_but(["eager"], ["eager", "flex_attention"]))
def test_other_attention_functions_are_the_models_own(attention: str, calls: Calls) -> None:
    model = apply_patch(make_model("mistral", attention), layers=["attention"])
    with torch.no_grad():
        call(model, make_batch("plain"))
    assert (calls.flash, calls.read) == ([], 0)


def test_a_function_that_another_library_has_put_in_the_table_runs(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = apply_patch(make_model("mistral"), layers=["attention"]), []

    def another(*arguments: Any, **options: Any) -> Any:
        ran.append(1)
        return masked_attention.sdpa_attention_forward(*arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", another)
    step(model, make_batch("plain"))
    assert (len(ran), calls.flash, calls.read) == (2, [], 0)


def test_layers_without_its_name_do_not_change_the_attention(calls: Calls) -> None:
    model = apply_patch(make_model("mistral"), layers=["rms_norm", "rotary", "gated"])
    assert count_layers(model)["attention"] == 0
    step(model, make_batch("plain"))
    assert (calls.flash, calls.read) == ([], 0)


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
@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_step_on_a_gpu_is_no_worse(
    model_type: str, kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_model(model_type), make_batch(kind)
    truth = step(widened(model), batch)
    model, batch = model.cuda(), {name: value.cuda() for name, value in batch.items()}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def in_autocast() -> Step:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(model, batch).loss
        return {"loss": loss.detach(), **gradients(model, loss)}

    eager = in_autocast()
    found = Calls(monkeypatch, served=False)
    apply_patch(model, layers=["attention"])
    ours = in_autocast()
    masked = SLIDING[model_type] if kind == "plain" else 2
    assert len(found.flash) == masked * (1 + checkpointing)
    assert not any(found.own)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)
