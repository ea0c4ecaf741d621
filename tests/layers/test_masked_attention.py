"""Attention of packed sequences and sliding windows computes without a mask what the model's own
computes with it. On a CPU, the reference stands for flash attention.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from torch import Tensor
from training_step import Step, call, gradients, joined, step, widened
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral.modeling_mistral import MistralAttention

from liger_patch import apply_patch, patch_status, revert_patch
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
    """Two rows of one sequence each, or packed with three, or one of them with padding."""
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
    if kind in ("padded", "padded left"):
        mask = torch.ones_like(input_ids)
        mask[1, slice(30, None) if kind == "padded" else slice(10)] = 0
        labels = batch["labels"].masked_fill(mask == 0, -100)
        labels[1, 10] = -100  # as of a prompt: the last padded token predicts it
        return batch | {"attention_mask": mask, "labels": labels}
    return batch


def causal_mask(kept: Tensor) -> Tensor:
    """Return (B, 1, T, T) bool: a caller's own mask of tokens (B, T) that are no padding."""
    place = torch.arange(TOKENS)
    return kept.bool()[:, None, None] & (place <= place[:, None])


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
        monkeypatch.setattr(masked_attention, "SDPA", counted)
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
        torch.testing.assert_close(found.cu_seqlens, ends)
        assert found.max_seqlen == 30


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["padded", "padded left"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_padding_without_a_label_needs_no_mask(
    model_type: str, kind: str, checkpointing: bool, calls: Calls
) -> None:
    """On the right it is the end of its sequence: whole rows. On the left, a sequence."""
    model, batch = make_model(model_type), make_batch(kind)
    truth, own = step(widened(model), batch), step(model, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.own.clear()
    ours = step(apply_patch(model, layers=["attention"]), batch)
    times, on_flash = 1 + checkpointing, 2 if kind == "padded left" else SLIDING[model_type]
    assert len(calls.flash) == times * on_flash
    assert calls.own == [False] * (times * (2 - on_flash))
    expected = [0, TOKENS, TOKENS + 10, 2 * TOKENS] if kind == "padded left" else None
    ends = [
        None if found.cu_seqlens is None else found.cu_seqlens.tolist() for found in calls.flash
    ]
    assert ends == [expected] * len(ends)
    assert_right(ours, own, truth)


def test_padding_of_zeros_gives_finite_gradients(calls: Calls) -> None:
    """Gemma 3n divides by the size of a hidden state, and that of a new padding token is zero."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 4},
        vocab_size_per_layer_input=131,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        activation_sparsity_pattern=[0.0] * 4,
        use_cache=False,
    )
    model, batch = AutoModelForCausalLM.from_config(config), make_batch("padded")
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    assert not model.get_input_embeddings().weight[0].any()
    truth, own = step(widened(model), batch), step(model, batch)
    calls.own.clear()
    ours = step(apply_patch(model, layers=["attention"]), batch)
    assert True not in calls.own
    assert_right(ours, own, truth)


@pytest.mark.parametrize("kind", ["padded", "padded left"])
def test_results_of_other_tokens_than_the_padding_are_the_same(kind: str, calls: Calls) -> None:
    model, batch = make_model("llama"), make_batch(kind)
    with torch.no_grad():
        own = apply_patch(model, layers=False)(**batch).logits
        calls.own.clear()
        ours = apply_patch(model, layers=["attention"])(**batch).logits
    assert True not in calls.own
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(torch.as_tensor(ours)[kept], torch.as_tensor(own)[kept])


@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_logits_of_padding_that_are_read_with_gradients_are_warned_of(
    kind: str, calls: Calls, recwarn: pytest.WarningsRecorder
) -> None:
    model, batch = apply_patch(make_model("mistral"), layers=["attention"]), make_batch(kind)
    with torch.no_grad():  # as in metrics
        logits = model(**batch).logits
    logits.sum()
    assert not recwarn.list
    for _ in range(2):
        outputs = model(**batch)
        (outputs.loss + outputs.logits.logsumexp(-1).mean()).backward()
    assert len(calls.flash) == 6
    found = [str(each.message) for each in recwarn.list]
    expected = "liger_patch outputs.logits of padded tokens are not eager's"
    assert [each.startswith(expected) for each in found] == [True] * (kind == "padded")


@pytest.mark.parametrize("kind", ["padded", "padded left"])
def test_recurrent_layers_see_padding_on_the_left(kind: str, calls: Calls) -> None:
    """Of Qwen3-Next: its linear attention and its convolutions see all tokens before theirs."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    apply_patch(model, layers=["attention"])(**make_batch(kind))
    assert (calls.flash, calls.own) == ([], [kind == "padded left"])


USES_OF_PADDING = {
    "a label behind padding": {"token": 29},  # the last padded token predicts token 30
    "a padded label": {"token": 35},
    "a label behind padding on the left": {"first": 10},
    "no labels": {"labels": None},
    "own logits": {"environment": "LIGER_PATCH_RETURN_LOGITS"},
    "not tested": {"tested": False},
    "a router": {"config": "output_router_logits"},
    "a router, asked for": {"argument": "output_router_logits"},
    "hidden states": {"argument": "output_hidden_states"},
    "logits in the loss": {"config": "z_loss_coefficient"},
    "several devices": {"devices": {"model": "cpu", "lm_head": "meta"}},
    "a mask of the caller's": {"dimensions": 4},
}


@pytest.mark.filterwarnings("ignore:liger_patch has no test of LlamaForCausalLM")
@pytest.mark.parametrize("kind", USES_OF_PADDING)
def test_padding_whose_results_may_be_used_keeps_its_mask(
    kind: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = apply_patch(make_model("llama"), layers=["attention"]), make_batch("padded")
    options: dict[str, Any] = {}
    match USES_OF_PADDING[kind]:
        case {"token": place}:
            batch["attention_mask"][1] = torch.arange(TOKENS) < place
            batch["labels"][1, place + 1] = 7
        case {"first": place}:
            batch["attention_mask"][1] = torch.arange(TOKENS) >= place
            batch["labels"][1, place] = 7
        case {"labels": None}:
            del batch["labels"]
        case {"environment": name}:
            monkeypatch.setenv(name, "1")
        case {"tested": False}:
            record = record_of(model)
            assert record is not None
            record.tested, record.compared = False, "before"
        case {"config": name}:
            setattr(model.config, name, 0.1)
        case {"argument": name}:
            options[name] = True
        case {"devices": devices}:
            model.hf_device_map = devices
        case {"dimensions": 4}:
            batch["attention_mask"] = causal_mask(batch["attention_mask"])
    model(**batch, **options)
    assert (calls.flash, calls.own, calls.read) == ([], [True, True], 1)


def test_a_loss_that_does_not_shift_its_labels_keeps_the_mask(calls: Calls) -> None:
    """Of M2M-100, whose first padded token may have a label."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "vocab_size": 131, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1}
    config = M2M100Config(**sizes, **heads, **widths, **tokens, use_cache=False)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa").eval()
    batch = make_batch("padded")
    given = {
        "input_ids": torch.randint(3, 131, (2, 9)),
        "decoder_input_ids": batch["input_ids"],
        "decoder_attention_mask": batch["attention_mask"],
        "labels": batch["labels"].index_fill(1, torch.tensor([30]), 7),
    }
    model(**given)
    own = calls.own.copy()
    calls.own.clear()
    apply_patch(model, layers=["attention"])(**given)
    assert (calls.flash, calls.own) == ([], own)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_call_of_the_inner_model_keeps_its_mask(checkpointing: bool, calls: Calls) -> None:
    model, batch = apply_patch(make_model("mistral"), layers=["attention"]), make_batch("plain")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model(batch["input_ids"]).last_hidden_state.sum().backward()
    assert (calls.flash, calls.read) == ([], 0)
    assert calls.own == [True, True] * (1 + checkpointing)


class WithPenalty(LlamaForCausalLM):
    """A user's class: its loss has a term of all hidden states, those of padding too."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs: Any) -> Any:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(states)
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss + states.square().mean(), logits=logits)


def test_a_forward_of_the_users_keeps_its_mask(calls: Calls) -> None:
    torch.manual_seed(0)
    model, batch = WithPenalty(CONFIGS["llama"]).train(), make_batch("padded left")
    truth, own = step(widened(model), batch), step(model, batch)
    calls.own.clear()
    ours = step(apply_patch(model, layers=["attention"]), batch)
    assert (calls.flash, calls.own) == ([], [True, True])
    assert_right(ours, own, truth)


def test_a_replaced_sdpa_is_called(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries replace the function, as SageAttention's users do."""
    counted, replaced = torch.nn.functional.scaled_dot_product_attention, []

    def another(*arguments: Any, **options: Any) -> Tensor:
        replaced.append(1)
        return counted(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", another)
    step(apply_patch(make_model("mistral"), layers=["attention"]), make_batch("plain"))
    assert (len(replaced), calls.flash, calls.read) == (2, [], 0)


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
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    apply_patch(model, layers=["attention"])
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

    def in_autocast() -> Step:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(model, batch).loss
        return {"loss": loss.detach(), **gradients(model, loss)}

    eager = in_autocast()
    found = Calls(monkeypatch, served=False)
    apply_patch(model, layers=["attention"])
    ours = in_autocast()
    masked = SLIDING[model_type] if kind in ("plain", "padded") else 2
    assert len(found.flash) == masked * (1 + checkpointing)
    assert not any(found.own)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)
