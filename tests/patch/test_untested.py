"""Architectures without a row: patched, compared with their own loss, and fused or left alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from compiled_graphs import MARKS, Graphs
from exactness import assert_no_worse
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import call, router_arguments, step, tell_apart
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.deferred.traced import TRACES_LOGITS
from liger_patch.layers.replace import count_layers
from liger_patch.patch import forward, loss, untested
from liger_patch.registry import Architecture

LLAMA = next(row for row in registry.available() if row.model_type == "llama")
NOTICE = "liger_patch has no test of .* they agree, and the loss is fused"
# The second name is what the reason of a loss that is not fused says.
PICKED = [
    (Architecture("gpt2", "GPT2LMHeadModel", ""), None),
    (Architecture("bloom", "BloomForCausalLM", ""), None),
    (Architecture("falcon", "FalconForCausalLM", ""), None),
    (Architecture("glm4_moe", "Glm4MoeForCausalLM", ""), None),
    (Architecture("deepseek_v3", "DeepseekV3ForCausalLM", ""), None),
    (Architecture("gpt_oss", "GptOssForCausalLM", ""), None),
    (Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", ""), None),
    (Architecture("idefics3", "Idefics3ForConditionalGeneration", ""), None),
    (Architecture("t5gemma", "T5GemmaForConditionalGeneration", ""), None),
    (Architecture("bart", "BartForCausalLM", ""), None),  # labels are not shifted
    (Architecture("bart", "BartForConditionalGeneration", ""), "a loss of its own that reads"),
    (Architecture("inkling2_text", "Inkling2ForCausalLM", ""), "were read by __getitem__"),
]


@pytest.fixture(autouse=True)
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ARCHITECTURES", ())


class Tomorrow(LlamaForCausalLM):
    """A class as a repository with code of its own has it: its loss is ``loss_of``."""

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        return self.loss_function(logits, labels, self.config.vocab_size)

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        hidden_states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(hidden_states)
        computed = None if labels is None else self.loss_of(logits, labels)
        return CausalLMOutputWithPast(loss=computed, logits=logits)


class Unshifted(Tomorrow):
    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class WithZLoss(Tomorrow):
    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        return super().loss_of(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


class NotCausal(Tomorrow):
    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        return nn.functional.mse_loss(logits.tanh(), torch.zeros_like(logits))


class OtherHead(Tomorrow):
    def get_output_embeddings(self) -> Any:
        return self.model.layers[0].mlp.up_proj


class LooksAtTypes(Tomorrow):
    """A loss that is another one for deferred logits: nobody can promise that there is none."""

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        computed = super().loss_of(logits, labels)
        return computed if type(logits) is Tensor else 1.001 * computed


class RefusesTypes(Tomorrow):
    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        if type(logits) is not Tensor:
            raise TypeError("plain tensors only")
        return super().loss_of(logits, labels)


class Changes(Tomorrow):
    calls = 0

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        type(self).calls += 1
        return super().loss_of(logits, labels) * self.calls


class Counts(Tomorrow):
    """Draws random numbers, and counts its forward passes in a buffer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        self.calls += 1
        return super().loss_of(nn.functional.dropout(logits, 0.0), labels) * torch.rand(())


def make_model(cls: type[PreTrainedModel] = Tomorrow, **options: Any) -> Any:
    model = tiny_model(LLAMA, **options)
    own = cls(model.config).to(model.dtype)
    own.load_state_dict(model.state_dict(), strict=False)
    return own.train()


def training_step(model: Any, batch: Any, **arguments: Any) -> tuple[dict[str, Any], list[str]]:
    """Loss and gradients, and what was warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results = step(model, batch, **arguments)
    return results, [str(each.message) for each in warned if "liger_patch" in str(each.message)]


def assert_eagers(model: Any, batch: Any, eager: Any, reason: str | None, **arguments: Any) -> None:
    """Two steps of a patched model are the eager one's; the first says what was found."""
    ours, said = training_step(model, batch, **arguments)
    again, nothing = training_step(model, batch, **arguments)
    assert len(said) == 1
    assert nothing == []
    status = patch_status(model)
    if reason is None:
        assert NOTICE.split(" .* ")[1] in said[0]
        assert (status.fused, status.architecture) == (True, "verified")
    else:
        assert reason in said[0]
        assert reason in str(status.reason)
        assert (status.fused, status.architecture) == (False, "differs")
    for results in (ours, again):
        expected, found = tell_apart(eager, results)
        assert_no_worse(found, expected, expected, torch.float32)


@pytest.mark.parametrize(("row", "reason"), PICKED, ids=lambda x: getattr(x, "class_name", ""))
def test_a_picked_class_is_verified_and_fused_or_left_alone(
    row: Architecture, reason: str | None
) -> None:
    if not hasattr(transformers, row.class_name):
        pytest.skip(f"Transformers {transformers.__version__} has no {row.class_name}")
    model = tiny_model(row).double()
    batch, arguments = tiny_batch(model), router_arguments(model)
    eager = step(model, batch, **arguments)
    assert_eagers(apply_patch(model), batch, eager, reason, **arguments)
    revert_patch(model)
    assert type(model).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Tomorrow, None),
        (Unshifted, None),
        (WithZLoss, None),
        (NotCausal, "a loss of its own that reads"),
        (OtherHead, "were read by mul before the loss"),
        (LooksAtTypes, "its own loss is"),
        (RefusesTypes, "with deferred logits, it raises TypeError: plain tensors only"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_class_of_ones_own_is_verified_and_fused_or_left_alone(
    cls: Any, reason: str | None, dtype: torch.dtype
) -> None:
    model = make_model(cls).to(dtype)
    batch = tiny_batch(model)
    truth = step(make_model(cls).double(), batch)
    eager = step(model, batch)
    if dtype == torch.float64:
        assert_eagers(apply_patch(model), batch, truth, reason)
        return
    ours, said = training_step(apply_patch(model), batch)
    assert len(said) == 1
    assert patch_status(model).fused == (reason is None)
    losses = [{"loss": results["loss"]} for results in (ours, eager, truth)]
    assert_no_worse(*losses, dtype, eps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_a_loss_off_by_little_is_found_in_any_dtype(dtype: torch.dtype, scale: float) -> None:
    """Also where all losses are near the logarithm of the vocabulary: at the start of training."""

    class Shifts(Tomorrow):
        def loss_of(self, logits: Any, labels: Tensor) -> Any:
            moved = labels if type(logits) is Tensor else labels.roll(1, -1)
            return super().loss_of(logits, moved)

    found = []
    for cls in (Tomorrow, Shifts):
        model = make_model(cls).to(dtype)
        model.lm_head.weight.data *= scale
        _, said = training_step(apply_patch(model), tiny_batch(model, length=40))
        found.append((len(said), patch_status(model).fused))
    assert found == [(1, True), (1, False)]


def test_a_loss_that_changes_from_call_to_call_is_not_fused() -> None:
    model = apply_patch(make_model(Changes))
    with pytest.warns(UserWarning, match="its own loss changes from call to call"):
        call(model, tiny_batch(model))
    assert patch_status(model).fused is False


def test_the_comparison_leaves_random_numbers_and_buffers_alone() -> None:
    results = []
    for ours in (False, True):
        model = make_model(Counts)
        batch = tiny_batch(model)
        if ours:
            apply_patch(model, layers=False)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [model(**batch).loss.item() for _ in range(2)]
        results.append((losses, torch.rand(()).item(), model.calls.item()))
    (eager, number, calls), (fused, *others) = results
    assert others == [number, calls]
    assert fused == pytest.approx(eager, rel=1e-6)
    assert calls == 2


def test_labels_are_masked_at_boundaries_only_where_they_are_shifted() -> None:
    """An unshifted label is not predicted across one."""
    for cls in (Tomorrow, Unshifted):

        class Packed(cls):
            def forward(self, input_ids: Any, labels: Any = None, position_ids: Any = None) -> Any:
                return super().forward(input_ids, labels)

        eager = make_model(Packed).double()
        batch = {k: v for k, v in tiny_batch(eager, batch=1).items() if k != "attention_mask"}
        batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        batch["labels"] = batch["input_ids"].clone()
        expected = dict(batch, labels=batch["labels"].clone())
        if cls is Tomorrow:
            expected["labels"][0, 4] = -100
        truth = call(eager, expected).loss
        model = apply_patch(make_model(Packed).double())
        with pytest.warns(UserWarning, match=NOTICE):
            torch.testing.assert_close(call(model, batch).loss, truth)


def test_a_model_without_a_head_is_left_alone_with_the_reason() -> None:
    config = tiny_model(LLAMA).config
    config.pad_token_id = 0
    model = transformers.LlamaForSequenceClassification(config).double()
    batch = tiny_batch(model) | {"labels": torch.tensor([0, 1])}
    batch["position_ids"] = torch.arange(9)[None]
    eager = step(model, batch)
    ours, said = training_step(apply_patch(model), batch)
    assert len(said) == 1
    assert "get_output_embeddings() returns None" in said[0]
    expected, found = tell_apart(eager, ours)
    assert_no_worse(found, expected, expected, torch.float32)


def test_a_batch_without_supervised_tokens_leaves_the_comparison_to_the_next() -> None:
    model = apply_patch(make_model(LooksAtTypes))
    batch = tiny_batch(model)
    assert call(model, batch | {"labels": torch.full_like(batch["labels"], -100)}).loss == 0
    assert patch_status(model).architecture == "not tested"
    with pytest.warns(UserWarning, match="its own loss is"):
        call(model, batch)


def test_an_evaluation_is_compared_too_and_the_first_training_step_says_so() -> None:
    model, batch = apply_patch(make_model()), tiny_batch(make_model())
    with torch.no_grad():
        call(model, batch)
    status = patch_status(model)
    assert (status.fused, status.architecture) == (True, "not tested")
    assert "verified" not in str(status)
    with pytest.warns(UserWarning, match=NOTICE):
        call(model, batch)
    assert "verified: its own loss" in str(patch_status(model))
    with torch.no_grad():
        other = apply_patch(make_model(LooksAtTypes), layers=False)
        with pytest.warns(UserWarning, match="its own loss is"):
            ours = call(other, batch).loss
        torch.testing.assert_close(ours, call(make_model(LooksAtTypes), batch).loss)


def test_gradients_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "disagreement", lambda *_, **__: "found a difference on purpose")
    model = apply_patch(make_model())
    with pytest.warns(UserWarning, match="the first training step found a difference on purpose"):
        call(model, tiny_batch(model))
    assert patch_status(model).fused is False


def test_options_are_left_out_of_the_comparison() -> None:
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"}
    model, known = make_model().double(), tiny_model(LLAMA).double()
    batch = tiny_batch(model)
    with pytest.warns(UserWarning, match=NOTICE):
        expected = step(apply_patch(known, **options), batch)
    with pytest.warns(UserWarning, match=NOTICE):
        ours = step(apply_patch(model, **options), batch)
    torch.testing.assert_close(ours, expected)


def test_an_option_that_cannot_reach_the_loss_is_an_error() -> None:
    model = apply_patch(make_model(NotCausal), z_loss=0.1)
    with pytest.raises(ValueError, match="cannot reach the loss that NotCausal computes"):
        call(model, tiny_batch(model))


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_way_out_and_the_demand_to_fuse(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", value)
    model = apply_patch(make_model(LooksAtTypes))
    batch = tiny_batch(model)
    if value == "1":
        assert call(model, batch).loss == call(make_model(LooksAtTypes), batch).loss
        assert patch_status(model).architecture == "not tested"
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match="demands the fused loss, but its own loss is"):
            call(model, batch)


@pytest.mark.parametrize("why", ["group", "memory"])
def test_where_losses_cannot_be_compared_the_slice_is(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    if why == "group":
        monkeypatch.setattr(untested, "in_process_group", lambda: True)
        monkeypatch.setattr(untested.distributed, "get_world_size", lambda: 2)
    else:
        monkeypatch.setattr(untested, "_loss_of", out_of_memory)
    model = apply_patch(make_model())
    batch = tiny_batch(model)
    with pytest.warns(UserWarning, match=f"It compared loss and .*, but not its own loss.*{why}"):
        call(model, batch)
    call(model, batch)
    assert patch_status(model).architecture == "verified"


def test_only_transformers_own_layers_are_on_kernels() -> None:
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    model = make_model()
    model.model.norm = type("OwnRMSNorm", (OwnNorm,), {})()
    apply_patch(model)
    assert count_layers(model) == {"rms_norm": 4, "rotary": 2, "gated": 2, "lora": 0}
    assert type(model.model.norm).__name__ == "OwnRMSNorm"
    with pytest.raises(ValueError, match="has no rms_norm layer that has a kernel"):
        apply_patch(make_model_without_norms(), layers=["rms_norm"])


def make_model_without_norms() -> Any:
    row = Architecture("gpt2", "GPT2LMHeadModel", "")
    return tiny_model(row)


def test_a_copy_and_a_pickle_know_what_was_compared() -> None:
    model = apply_patch(tiny_model(LLAMA))
    batch = tiny_batch(model)
    with pytest.warns(UserWarning, match=NOTICE):
        call(model, batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        call(other, batch)
        assert patch_status(other).architecture == "verified"


def test_a_class_with_a_row_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ARCHITECTURES", (LLAMA,))
    monkeypatch.setattr(untested, "_loss_of", lambda *_: pytest.fail("compared"))
    model = apply_patch(tiny_model(LLAMA))
    call(model, tiny_batch(model))
    assert patch_status(model).architecture == "tested"


class TestCompiled:
    pytestmark = MARKS

    def test_the_comparison_breaks_the_graph_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        compare = forward.compare_losses
        monkeypatch.setattr(
            forward, "compare_losses", lambda *each: (calls.append(1), compare(*each))
        )
        model = apply_patch(tiny_model(LLAMA), layers=False)
        batch, graphs = tiny_batch(model), Graphs("eager")
        compiled: Any = torch.compile(model, backend=graphs)
        with pytest.warns(UserWarning, match=NOTICE):
            compiled(**batch)
        first, outputs = len(graphs.linears), [compiled(**batch) for _ in range(3)][-1]
        assert calls == [1]
        assert patch_status(model).fused
        torch.testing.assert_close(outputs.loss, call(tiny_model(LLAMA), batch).loss)
        torch._dynamo.reset()
        again = Graphs("eager")
        torch.compile(model, backend=again)(**batch)
        assert len(again.linears) == (1 if TRACES_LOGITS else first - 1) < first


def test_the_first_step_under_autocast_has_every_gradient() -> None:
    """Autocast of torch 2.6 keeps casts of weights, also those that were made without gradients."""
    model = apply_patch(tiny_model(LLAMA))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match=NOTICE):
        outputs = call(model, tiny_batch(model))
    outputs.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_an_argument_that_changes_in_a_call_is_left_to_it() -> None:
    model = tiny_model(LLAMA)
    arguments = tiny_batch(model)
    caches = [transformers.DynamicCache() for _ in range(2)]
    expected = model(**arguments, past_key_values=caches[0])
    with pytest.warns(UserWarning, match="not its own loss, as an argument may change"):
        ours = apply_patch(model)(**arguments, past_key_values=caches[1])
    assert patch_status(model).fused
    torch.testing.assert_close(ours.loss, expected.loss)
    assert caches[1].get_seq_length() == caches[0].get_seq_length()


def test_a_comparison_of_gradients_that_does_not_fit_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def does_not_fit(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loss, "disagreement", does_not_fit)
    model = apply_patch(tiny_model(LLAMA))
    with pytest.warns(UserWarning, match="but no gradients, as memory was short: they agree"):
        call(model, tiny_batch(model)).loss.backward()
    assert patch_status(model).fused
    monkeypatch.setenv("LIGER_PATCH_VERIFY", "1")
    with pytest.raises(torch.OutOfMemoryError):
        call(apply_patch(tiny_model(LLAMA)), tiny_batch(model))


class KeepsState(Tomorrow):
    """Its loss depends on a counter and on a buffer that is set anew, and it writes to labels."""

    calls = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("average", torch.ones(()))

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        self.calls, self.average = self.calls + 1, 0.5 * self.average
        labels[:, 0] += 1
        return super().loss_of(logits, labels) * self.calls + self.average


def test_what_a_model_keeps_is_that_of_one_call() -> None:
    eager = tiny_model(LLAMA)
    eager.__class__ = KeepsState
    eager.register_buffer("average", torch.ones(()))
    model = apply_patch(copy.deepcopy(eager))
    batches = [tiny_batch(eager) for _ in range(2)]
    expected = call(eager, batches[0])
    with pytest.warns(UserWarning, match=NOTICE):
        ours = call(model, batches[1])
    torch.testing.assert_close(ours.loss, expected.loss)
    assert (model.calls, model.average) == (eager.calls, eager.average) == (1, 0.5)
    torch.testing.assert_close(batches[1]["labels"], batches[0]["labels"])


class Checkpointed(Tomorrow):
    """Computes head and loss again in the backward pass."""

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        def loss_of(hidden_states: Tensor) -> Any:
            return self.loss_of(self.lm_head(hidden_states), labels)

        hidden_states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        loss = torch.utils.checkpoint.checkpoint(loss_of, hidden_states, use_reentrant=False)
        return CausalLMOutputWithPast(loss=loss)


def test_a_checkpoint_around_head_and_loss_is_computed_again() -> None:
    eager = tiny_model(LLAMA)
    eager.__class__ = Checkpointed
    model = apply_patch(copy.deepcopy(eager))
    expected = step(eager, tiny_batch(eager))
    with pytest.warns(UserWarning, match=NOTICE):
        ours = step(model, tiny_batch(model))
    torch.testing.assert_close(ours, expected)  # its gradients are those of the ordinary path
