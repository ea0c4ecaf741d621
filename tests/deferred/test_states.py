"""Deferred logits in whatever state the program is in when they are made, read or used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status


def llama(*, patched: bool = True) -> PreTrainedModel:
    model = tiny_model()
    return apply_patch(model, layers=False) if patched else model


def test_an_optimizer_of_another_model_changes_nothing() -> None:
    model = llama()
    logits = model(**tiny_batch(model)).logits
    other = llama(patched=False)
    other(**tiny_batch(other)).loss.backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    assert logits.sum().isfinite()


def checkpointed_loss(model: PreTrainedModel, read: bool) -> Tensor:
    batch = tiny_batch(model)
    embeddings = model.get_input_embeddings()(batch["input_ids"])

    def forward(embeddings: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(inputs_embeds=embeddings, labels=batch["labels"])
        if read:
            outputs.logits.sum()
        return outputs.loss, outputs.logits

    loss, logits = checkpoint(forward, embeddings, use_reentrant=True)
    return loss + logits.square().mean()


@pytest.mark.parametrize("read", [False, True])
def test_gradients_pass_through_a_reentrant_checkpoint(read: bool) -> None:
    """Also where the logits are read within."""
    ours, eager = llama(), llama(patched=False)
    checkpointed_loss(ours, read).backward()
    checkpointed_loss(eager, read).backward()
    for (name, mine), other in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)


def test_a_head_outside_the_autocast_of_the_forward_stays_in_its_dtype() -> None:
    gradients = []
    for patched in (True, False):
        model = llama(patched=patched)
        plain = model.lm_head.forward
        with torch.autocast("cpu", dtype=torch.bfloat16):

            def forward(hidden_states: Tensor, plain: Callable = plain) -> Tensor:
                with torch.autocast("cpu", enabled=False):
                    return plain(hidden_states.float())

            model.lm_head.forward = forward
            loss = model(**tiny_batch(model)).loss
        loss.backward()
        gradients.append(model.lm_head.weight.grad)
    torch.testing.assert_close(*gradients)


def test_one_model_in_several_threads_is_left_as_it_was() -> None:
    model = llama().double()
    batch, losses = tiny_batch(model), []

    def run() -> None:
        with torch.no_grad():
            losses.extend(model(**batch).loss for _ in range(10))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(run) for _ in range(4)]:
                future.result()
    finally:
        sys.setswitchinterval(interval)
    assert patch_status(model).fused
    assert len(losses) == 40
    assert {each.dtype for each in losses} == {torch.float64}  # Transformers' own is in float32
    assert "forward" not in vars(model.lm_head)
    assert "_loss_function" not in vars(model)


def test_a_call_without_labels_in_another_thread_is_not_deferred() -> None:
    model = llama()
    batch = tiny_batch(model)
    expected = model(input_ids=batch["input_ids"]).logits
    seen: list[Tensor] = []

    def run() -> None:
        seen.append(model(input_ids=batch["input_ids"]).logits)

    def meanwhile(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    model.model.register_forward_hook(meanwhile)
    model(**batch)
    assert type(seen[0]) is Tensor
    torch.testing.assert_close(seen[0], expected)
    assert patch_status(model).fused
