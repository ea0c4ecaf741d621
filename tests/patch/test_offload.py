"""Offloaded checkpoints: the same gradients bit for bit, and layer inputs that leave the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from offloaded_models import (
    KINDS,
    assert_as_without,
    gradients,
    inputs_alive,
    model_of,
    offloaded,
    step,
    tiny_batch_of,
)
from slow_cases import slow_but
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_step import with_checkpoints
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.patch.layer_input import PIECE_BYTES
from liger_patch.patch.offload import FUNCTION, CheckpointOffload


@pytest.mark.parametrize(
    ("reentrant", "autocast", "layers"),
    slow_but(
        [(False, False, False), (True, True, True), (False, True, True), (True, False, False)],
        list(itertools.product((False, True), repeat=3)),
    ),
)
def test_gradients_are_those_of_plain_checkpoints(
    reentrant: bool, autocast: bool, layers: bool
) -> None:
    """Of layers with dropout: each runs again with the random numbers that it had."""
    sizes = {"num_hidden_layers": 5}
    plain, model = (model_of(reentrant, **sizes) for _ in range(2))
    apply_patch(plain, layers=layers)
    offload = offloaded(model, layers=layers)
    for seed in (0, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same_bits(step(model, seed), step(plain, seed))
    said = f"4 layer inputs, {4 * PIECE_BYTES / 2**20:g} MiB of host memory"
    assert str(offload) == said
    assert dict(patch_status(model).rows)["checkpoint offload"] == said


@pytest.mark.parametrize(
    ("model_type", "reentrant"),
    [("gemma2", False), ("gemma3n_text", True), ("gemma4_text", False), ("qwen3_moe", True)],
)
def test_architectures_that_pass_more_to_their_layers(model_type: str, reentrant: bool) -> None:
    if model_type not in ROWS:
        pytest.skip(f"this Transformers has no {model_type}")
    models: list[Any] = []

    def make() -> Any:
        models.append(with_checkpoints(tiny_model(model_type), reentrant))
        return models[-1]

    def run(model: Any) -> None:
        model(**tiny_batch(model), use_cache=False).loss.backward()

    offload = assert_as_without(run, make)
    count = sum(isinstance(m, GradientCheckpointingLayer) for m in models[-1].modules())
    assert str(offload).startswith(f"{count - 1} layer inputs")


@KINDS
def test_inputs_leave_the_device_but_for_the_last(reentrant: bool) -> None:
    """The last that is kept is never copied; the loss drops the one before."""
    batch = tiny_batch_of(model := apply_patch(model_of(reentrant, num_hidden_layers=6)))
    loss, alive = inputs_alive(model, lambda: model(**batch).loss)
    assert alive == [True] * 6
    offload = offloaded(model)
    loss, alive = inputs_alive(model, lambda: model(**batch).loss)
    assert alive == [False] * 5 + [True]
    assert offload.host_bytes == 5 * PIECE_BYTES
    loss.backward()


def several_forward_passes(model: Any) -> None:
    """Before a backward pass."""
    losses = [model(**tiny_batch_of(model, seed)).loss for seed in (0, 1, 2)]
    for loss in (losses[1], losses[0] + losses[2]):
        loss.backward()


def retained_graph(model: Any) -> None:
    loss = model(**tiny_batch_of(model), use_cache=False).loss
    loss.backward(retain_graph=True)
    loss.backward()


def checkpoint_around_the_whole_model(model: Any) -> dict[str, Tensor]:
    batch = tiny_batch_of(model)
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()

    def loss_of(values: Tensor) -> Tensor:
        return model(inputs_embeds=values, labels=batch["labels"], use_cache=False).loss

    checkpoint(loss_of, embeddings, use_reentrant=False).backward()
    assert embeddings.grad is not None
    return {"input": embeddings.grad, **gradients(model)}


def optimizer_that_steps_in_the_backward_pass(model: Any) -> dict[str, Tensor]:
    """A layer runs again before its own backward pass, so with the weights that it had."""

    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    for seed in range(2):
        model(**tiny_batch_of(model, seed), use_cache=False).loss.backward()
    return {name: values.detach() for name, values in model.named_parameters()}


@KINDS
@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (several_forward_passes, 3),
        (retained_graph, 1),
        (checkpoint_around_the_whole_model, 2),
        (optimizer_that_steps_in_the_backward_pass, 1),
    ],
)
def test_steps_of_other_kinds(run: Callable[[Any], Any], passes: int, reentrant: bool) -> None:
    offload = assert_as_without(run, lambda: model_of(reentrant, num_hidden_layers=4))
    assert offload.host_bytes == passes * 3 * PIECE_BYTES


def test_calls_without_labels_offload_too() -> None:
    offload = offloaded(model := model_of())
    with pytest.warns(UserWarning, match="was called without labels"):
        model(input_ids=tiny_batch_of(model)["input_ids"]).logits.sum().backward()
    assert str(offload).startswith("2 layer inputs")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_compiled_models_keep_their_checkpoints() -> None:
    results = []
    for is_offloaded in (False, True):
        # two layers, each of which takes the compiler seconds: the input of one would be offloaded
        model = apply_patch(model_of(attention_dropout=0.0, num_hidden_layers=2), layers=False)
        offload = offloaded(model, layers=False) if is_offloaded else None
        results.append(step(torch.compile(model, backend="eager")))
        assert offload is None or offload.host_bytes == 0
    assert_same_bits(*results)


@KINDS
def test_lora(reentrant: bool) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, lora_dropout=0.5, target_modules=["q_proj", "up_proj"], init_lora_weights=False
        )
        return with_checkpoints(peft.get_peft_model(model_of(None), config), reentrant)

    assert str(assert_as_without(step, make)).startswith("2 layer inputs")


@pytest.mark.gpu
@KINDS
def test_gradients_and_memory_on_a_gpu(reentrant: bool) -> None:
    """Peak memory falls by the inputs of all layers but four: the last two, that of the embeddings,
    which is a leaf, and slack (an H200 kept 3.3 of 12, and 3.7 of 16). With a bound of five inputs,
    it falls by these but two: the leaf, and slack.
    """
    layers, hidden, tokens = 12, 512, 16384
    size, fitting = tokens * hidden * 2, 5
    sizes: Any = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": hidden}
    found, peaks, before = [], [], 0
    for checkpoint_offload in (False, True, fitting * size / 2**30):
        config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).train()
        model = apply_patch(
            with_checkpoints(model, reentrant), checkpoint_offload=checkpoint_offload
        )
        for name, values in model.named_parameters():
            values.requires_grad_("down_proj" in name)
        ids = torch.randint(0, 64, (128, tokens // 128), device="cuda")
        is_bounded = not isinstance(checkpoint_offload, bool)
        for i in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            warns = pytest.warns(UserWarning, match=f"keeps {layers - fitting} of {layers}")
            with warns if is_bounded and i == 0 else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append(gradients(model))
        revert_patch(model)
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    assert peaks[0] - peaks[1] >= (layers - 4) * size
    assert peaks[0] - peaks[2] >= (fitting - 2) * size


class Checkpointed(GradientCheckpointingLayer):
    """A layer whose forward can modify what it is given."""

    gradient_checkpointing = True

    def __init__(self, *, modifies: bool = False) -> None:
        super().__init__()
        self.modifies = modifies
        setattr(self, FUNCTION, functools.partial(checkpoint, use_reentrant=False))

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = x.sin()
        if self.modifies:
            x.mul_(2)
        return y


def offload_of_two_layers(x: Tensor) -> CheckpointOffload:
    """Whose first input is x, with the right gradient. The last is never copied."""
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    with offload.forward_pass(layer):
        y, last = layer(x), layer(torch.ones(4, requires_grad=True))
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.cos(x))
    del last
    return offload


@pytest.mark.parametrize("is_view", [False, True])
def test_inputs_larger_than_a_piece(is_view: bool) -> None:
    x = torch.randn(700, 3, 3001, requires_grad=True)
    offload = offload_of_two_layers(x[1:] if is_view else x)
    assert offload.host_bytes == 2 * PIECE_BYTES


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 9)[:, 5:],
        lambda: torch.randn(8, 1).expand(8, 9),
        lambda: torch.randn(9, 8).mT,
        lambda: torch.randn(0, 9),
        lambda: nn.Parameter(torch.randn(8, 9)),
    ],
    ids=["gaps", "expanded", "transposed", "empty", "a parameter"],
)
def test_inputs_that_stay_on_the_device(make: Callable[[], Tensor]) -> None:
    offload = offload_of_two_layers(make().requires_grad_())
    assert str(offload) == "0 layer inputs, 0 MiB of host memory"


@pytest.mark.filterwarnings("ignore:liger_patch offloads no checkpoint")
@pytest.mark.parametrize(("min_bytes", "later"), [(1, 0), (1, 1), (1, 2), (2**20, 0)])
def test_an_input_modified_in_place_is_an_error(min_bytes: int, later: int) -> None:
    """PyTorch itself does not look at saved tensors that hooks have seen."""
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=min_bytes)
    layer = Checkpointed(modifies=True)
    with offload.forward_pass(layer):
        y = layer(torch.ones(4, requires_grad=True) * 1)
        others = [layer(torch.ones(4, requires_grad=True) * 1) for _ in range(later)]
    assert len(others) * PIECE_BYTES == offload.host_bytes
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_arguments_stay_as_they_are() -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    x, mask, others = torch.ones(4, requires_grad=True), torch.ones(4).bool(), torch.ones(4)
    with offload.forward_pass(layer):
        y = layer(layer(x, mask, others, "name"), mask, others, "name")
    assert str(offload).startswith("1 layer inputs")
    y.sum().backward()
