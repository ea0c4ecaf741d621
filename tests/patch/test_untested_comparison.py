"""The comparison in the first call of an architecture without a row: when, and without a trace."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import assert_same_step, call, step
from transformers.modeling_outputs import CausalLMOutputWithPast
from untested_classes import NOTICE, LooksAtTypes, Tomorrow, make_model

from liger_patch import apply_patch, patch_status
from liger_patch.patch import verify

pytestmark = pytest.mark.usefixtures("no_rows")


class InMapping(Tomorrow):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return dict(super().forward(*args, **kwargs))


class Renamed(Tomorrow):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        return {"lm_loss": outputs.loss, "logits": outputs.logits}


@pytest.mark.parametrize("cls", [InMapping, Renamed])
def test_outputs_in_a_mapping_are_compared_once(cls: Any) -> None:
    model, batch = apply_patch(make_model(cls)), tiny_batch(make_model())
    calls: list[Any] = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    said = NOTICE if cls is InMapping else "was not compared with .*, which its outputs do not"
    with torch.no_grad(), pytest.warns(UserWarning, match=said):
        model(**batch)
    calls.clear()
    model(**batch)
    assert len(calls) == 1
    assert patch_status(model).fused
    assert patch_status(model).architecture == ("verified" if cls is InMapping else "not tested")


def test_a_batch_without_supervised_tokens_leaves_the_comparison_to_the_next() -> None:
    model = apply_patch(make_model(LooksAtTypes))
    batch = tiny_batch(model)
    assert call(model, batch | {"labels": torch.full_like(batch["labels"], -100)}).loss == 0
    assert patch_status(model).architecture == "not tested"
    with pytest.warns(UserWarning, match="its own loss is"):
        call(model, batch)


def test_an_evaluation_has_the_loss_of_a_model_that_differs() -> None:
    model, eager = apply_patch(make_model(LooksAtTypes), layers=False), make_model(LooksAtTypes)
    batch = tiny_batch(eager)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="its own loss is"):
            ours = call(model, batch).loss
        torch.testing.assert_close(ours, call(eager, batch).loss)


@pytest.mark.parametrize("why", ["group", "memory"])
def test_where_losses_cannot_be_compared_one_warning_says_so(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    if why == "group":
        monkeypatch.setattr(verify, "in_process_group", lambda: True)
        monkeypatch.setattr(verify.distributed, "get_world_size", lambda: 2)
    else:
        monkeypatch.setattr(verify, "_loss_of", out_of_memory)
    model = apply_patch(make_model())
    batch = tiny_batch(model)
    with pytest.warns(UserWarning, match=f"was not compared with the model's own, .*{why}"):
        call(model, batch)
    call(model, batch)
    status = patch_status(model)
    assert (status.fused, status.architecture) == (True, "not tested")


def test_a_copy_and_a_pickle_know_what_was_compared() -> None:
    model = apply_patch(tiny_model())
    batch = tiny_batch(model)
    with pytest.warns(UserWarning, match=NOTICE):
        call(model, batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        call(other, batch)
        assert patch_status(other).architecture == "verified"


def test_the_first_step_under_autocast_has_every_gradient() -> None:
    """Autocast of torch 2.6 keeps casts of weights, also those that were made without gradients."""
    model = apply_patch(tiny_model())
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match=NOTICE):
        outputs = call(model, tiny_batch(model))
    outputs.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_an_argument_that_changes_in_a_call_is_left_to_it(model: Any) -> None:
    arguments = tiny_batch(model)
    caches = [transformers.DynamicCache() for _ in range(2)]
    expected = model(**arguments, past_key_values=caches[0])
    with pytest.warns(UserWarning, match="the model's own, as an argument may change"):
        ours = apply_patch(model)(**arguments, past_key_values=caches[1])
    assert patch_status(model).fused
    torch.testing.assert_close(ours.loss, expected.loss)
    assert caches[1].get_seq_length() == caches[0].get_seq_length()


class KeepsState(Tomorrow):
    """Its loss depends on random numbers, on a counter and on buffers, and it writes to labels."""

    calls = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("average", torch.ones(()))  # set anew
        self.register_buffer("count", torch.zeros((), dtype=torch.long))  # written to

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        self.calls, self.average = self.calls + 1, 0.5 * self.average
        self.count += 1
        labels[:, 0] += 1
        computed = super().loss_of(logits, labels) * torch.rand(())
        return computed * self.calls * self.count + self.average


def test_what_a_model_keeps_and_draws_is_that_of_one_call() -> None:
    eager, model = make_model(KeepsState), apply_patch(make_model(KeepsState), layers=False)
    batches, results = [tiny_batch(eager) for _ in range(2)], []
    for each, batch in zip((eager, model), batches, strict=True):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append((call(each, batch).loss, torch.rand(())))
    torch.testing.assert_close(results[1], results[0])
    assert patch_status(model).architecture == "verified"
    assert (model.calls, model.average, model.count) == (1, 0.5, 1)
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
    eager = tiny_model()
    eager.__class__ = Checkpointed
    model = apply_patch(copy.deepcopy(eager))
    expected = step(eager, tiny_batch(eager))
    with pytest.warns(UserWarning, match=NOTICE):
        ours = step(model, tiny_batch(model))
    torch.testing.assert_close(ours, expected)  # its gradients are those of the ordinary path


def test_a_hook_that_needs_gradients_runs_in_the_call() -> None:
    """It raises an error in the passes that are compared, which have none."""
    model, names = make_model(Tomorrow).double(), []
    model.model.norm.register_forward_hook(lambda *args: names.append(args[2].grad_fn.name()))
    batch = tiny_batch(model)
    eager = step(model, batch)
    with pytest.warns(UserWarning, match="'NoneType' object has no attribute 'name'"):
        ours = step(apply_patch(model), batch)
    assert patch_status(model).fused
    assert_same_step(ours, eager)


class HooksItself(Tomorrow):
    """Keeps the handles of hooks on its norm, which it registers when it is called."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.handles: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare()
        return super().forward(*args, **kwargs)

    def prepare(self) -> None:
        if not self.handles:
            self.register()

    def register(self) -> None:
        self.handles.append(self.model.norm.register_forward_hook(self.hook))

    def hook(self, _: nn.Module, __: object, states: Tensor) -> Tensor:
        return 3 * states


class Flagged(HooksItself):
    """Knows by a number that the hook is there."""

    is_ready = False

    def prepare(self) -> None:
        if not self.is_ready:
            self.register()
            self.is_ready = True


class HooksAnew(HooksItself):
    """Replaces its hook at each call."""

    def prepare(self) -> None:
        for each in self.handles:
            each.remove()
        self.register()


class HookedOnce(HooksItself):
    """Has a hook from the start, which removes itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register()

    def hook(self, _: nn.Module, __: object, states: Tensor) -> Tensor:
        self.handles[0].remove()
        return 3 * states


@pytest.mark.parametrize("cls", [HooksItself, Flagged, HooksAnew, HookedOnce])
@pytest.mark.parametrize("hooks", [0, 1])
@pytest.mark.filterwarnings(f"ignore:.*{NOTICE}")
def test_hooks_come_and_go_in_the_call(cls: Any, hooks: int) -> None:
    losses = []
    for patched in (False, True):
        model = make_model(cls)
        for _ in range(hooks):  # another one on the same module
            model.model.norm.register_forward_hook(lambda *args: args[2] + 1)
        if patched:
            apply_patch(model)
        batch = tiny_batch(model)
        losses.append([step(model, batch)["loss"] for _ in range(2)])
    assert patch_status(model).architecture == "verified"
    torch.testing.assert_close(losses[1], losses[0])


def test_a_call_that_fails_is_not_the_one_that_is_compared() -> None:
    model = apply_patch(make_model(Tomorrow))
    batch = tiny_batch(model)
    wrong = {**batch, "labels": torch.full_like(batch["labels"], 10**6)}
    with (
        pytest.warns(UserWarning, match="was not compared"),
        pytest.raises(Exception, match="1000000"),
    ):
        call(model, wrong)
    with pytest.warns(UserWarning, match=NOTICE):
        call(model, batch)
    assert patch_status(model).architecture == "verified"
