"""The loss of a patched model's outputs, and that of user code on outputs.logits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from exactness import assert_no_worse
from slow_cases import pairwise, slow_but
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from training_step import Float64, Step, call, gradients, patched, step, widened

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.deferred.tensor import DeferredLogits

MODEL_TYPES = "cohere", "gemma2", "llama"
CLASS_WEIGHT = torch.rand(V, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TOKEN_WEIGHT = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (16, V), labels (16,) -> ()
USER_LOSSES: dict[str, Loss] = {
    "mean": cross_entropy,
    "sum": lambda x, y: cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: (cross_entropy(x, y, reduction="none") * TOKEN_WEIGHT).sum(),
    "label smoothing": lambda x, y: cross_entropy(x, y, label_smoothing=0.1),
    "class weights": lambda x, y: cross_entropy(x, y, CLASS_WEIGHT),
    "class weights, label smoothing": lambda x, y: cross_entropy(
        x, y, weight=CLASS_WEIGHT, label_smoothing=0.2
    ),
    "class weights, sum": lambda x, y: cross_entropy(x, y, CLASS_WEIGHT, reduction="sum"),
    "class weights, none": lambda x, y: cross_entropy(x, y, CLASS_WEIGHT, reduction="none").mean(),
    "ignore_index": lambda x, y: cross_entropy(x, y.where(y >= 0, 3), ignore_index=3),
    "by name": lambda x, y: cross_entropy(input=x, target=y),
    "module": lambda x, y: nn.CrossEntropyLoss(CLASS_WEIGHT, label_smoothing=0.1)(x, y),
    "scaled": lambda x, y: cross_entropy(x / 2.0, y),
    "softcapped": lambda x, y: cross_entropy(torch.tanh(x / 3.0) * 3.0, y),
    "cut": lambda x, y: cross_entropy(x[2:14], y[2:14]),
    "supervised only": lambda x, y: cross_entropy(x[y >= 0], y[y >= 0]),
    "double": lambda x, y: cross_entropy(x.double(), y),
    "flattened": lambda x, y: cross_entropy(x.view(2, 8, V).flatten(end_dim=-2), y),
    "two losses": lambda x, y: cross_entropy(x, y) + 2 * cross_entropy(x / 2.0, y.roll(1)),
}
UNFUSED: dict[str, Loss] = {
    "probabilities": lambda x, y: cross_entropy(x, torch.full((16, V), 1 / V).double()),
    "three dimensions": lambda x, y: cross_entropy(x.view(2, 8, V).mT, y.view(2, 8)),
    "one row": lambda x, y: cross_entropy(x[0], torch.tensor(5)),
    "nll_loss": lambda x, y: nn.functional.nll_loss(x.log_softmax(-1), y),
    "negative scale": lambda x, y: cross_entropy(-x, y),
    "twice capped": lambda x, y: cross_entropy(x.tanh().tanh(), y),
    "per word": lambda x, y: cross_entropy(x * torch.linspace(0.5, 1.0, V), y),
    "fewer words": lambda x, y: cross_entropy(x[:, 7:], y.clamp(max=100)),
    "legacy reduction": lambda x, y: legacy_sum(x, y),
}


def legacy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        return cross_entropy(logits, labels, size_average=False)


def step_with(model: Any, batch: dict, loss_function: Loss, fused: bool) -> Step:
    outputs = call(model, batch)
    labels = batch["labels"][..., 1:].reshape(-1)
    with Float64():
        loss = loss_function(outputs.logits[..., :-1, :].reshape(-1, V), labels)
    if fused:
        assert not outputs.logits.is_computed
    return {"loss": loss.detach(), **gradients(model, loss)}


LOSSES = [*USER_LOSSES, *UNFUSED]
OF_SCALED_LOGITS = ("class weights, label smoothing", "scaled", "softcapped", "twice capped")


@pytest.mark.parametrize(
    ("model_type", "name"),
    slow_but(
        [("llama", name) for name in LOSSES]
        + list(itertools.product(("cohere", "gemma2"), OF_SCALED_LOGITS)),
        list(itertools.product(MODEL_TYPES, LOSSES)),
    ),
)
def test_a_users_loss_on_the_logits_is_eagers(model_type: str, name: str) -> None:
    loss_function = USER_LOSSES.get(name) or UNFUSED[name]
    capped_twice = model_type == "gemma2" and name == "softcapped"
    fused = name in USER_LOSSES and not capped_twice
    model = widened(tiny_model(model_type))
    truth = step_with(model, tiny_batch(model), loss_function, False)
    with patched(model, layers=False):
        ours = step_with(model, tiny_batch(model), loss_function, fused)
        assert patch_status(model).fused
    assert_no_worse(ours, truth, truth, torch.float32)


def test_a_users_loss_is_not_changed_by_the_options_of_the_patch() -> None:
    model = widened(tiny_model())
    batch = tiny_batch(model)
    truth = step_with(model, batch, cross_entropy, False)
    with patched(model, label_smoothing=0.5, z_loss=1.0, reduction="sum"):
        ours = step_with(model, batch, cross_entropy, True)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize(
    ("reduction", "inside", "dtype"),
    pairwise(["mean", "sum", "none"], [True, False], [torch.bfloat16, torch.float32, "autocast"]),
)
def test_a_users_loss_has_eagers_dtype(dtype: Any, inside: bool, reduction: str) -> None:
    autocast = dtype == "autocast"
    dtypes, dtype = [], torch.float32 if autocast else dtype
    for model in (tiny_model(dtype=dtype), apply_patch(tiny_model(dtype=dtype))):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = call(model, tiny_batch(model)).logits
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and inside):
            labels = torch.zeros(18, dtype=torch.int64)
            loss = cross_entropy(logits.view(-1, V), labels, reduction=reduction)
        dtypes.append((loss.dtype, loss.shape))
    assert dtypes[0] == dtypes[1]


class BrokenError(RuntimeError):
    pass


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("where", ["embed_tokens", "norm", "head", "loss"])
def test_an_error_inside_the_forward_pass_leaves_the_model_clean(where: str) -> None:
    def broken(*args: Any) -> None:
        raise BrokenError

    model = tiny_model()
    batch = tiny_batch(model)
    expected = call(model, batch)
    apply_patch(model)
    before = attributes(model)
    if where == "loss":
        labels = batch["labels"].index_fill(1, torch.tensor([3]), V)
        with pytest.raises(ValueError, match=rf"labels must be in \[0, {V}\) .* got {V}"):
            call(model, batch | {"labels": labels})
    else:
        module = model.lm_head if where == "head" else getattr(model.model, where)
        handle = module.register_forward_hook(broken)
        with pytest.raises(BrokenError):
            call(model, batch)
        handle.remove()
    assert attributes(model) == before
    outputs = call(model, batch)
    assert patch_status(model).fused
    torch.testing.assert_close(outputs.loss, expected.loss)
    without_labels = call(model, {n: value for n, value in batch.items() if n != "labels"})
    assert type(without_labels.logits) is Tensor
    assert torch.equal(without_labels.logits, expected.logits)


@pytest.mark.parametrize("num_items_in_batch", [None, 0, torch.tensor(0), 3])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("return_logits", ["0", "1"])
def test_no_supervised_token_gives_zero_loss_and_zero_gradients(
    monkeypatch: pytest.MonkeyPatch, model_type: str, num_items_in_batch: Any, return_logits: str
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", return_logits)
    model = apply_patch(tiny_model(model_type))
    batch = tiny_batch(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    one_token = {name: value[:, :1] for name, value in batch.items()}
    for each in (batch, one_token):
        ours = step(model, each, num_items_in_batch=num_items_in_batch)
        assert ours.pop("loss").item() == 0.0
        assert all(gradient is None or not gradient.any() for gradient in ours.values())


def test_a_resized_vocabulary_is_fused(model: Any) -> None:
    apply_patch(model)
    model.resize_token_embeddings(V + 6, mean_resizing=False)
    model = model.double()
    ours = step(model, tiny_batch(model))
    assert patch_status(model).fused
    assert f"Linear ({V + 6}, 32)" in dict(patch_status(model).rows)["head"]
    assert call(model, tiny_batch(model)).logits.shape == (2, 9, V + 6)
    truth = step(revert_patch(model), tiny_batch(model))
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize(
    ("change", "got"), [(Tensor.tolist, "a list"), (lambda x: x[:, :-2], "(2, 7)")]
)
def test_labels_that_do_not_fit_are_named(name: str, change: Callable, got: str) -> None:
    model = apply_patch(tiny_model())
    batch = tiny_batch(model)
    batch[name] = change(batch["labels"])
    message = re.escape(f"{name} must be a tensor of shape (2, 9), got {got}")
    with pytest.raises(ValueError, match=message):
        call(model, batch)


class OutOfMemory(TorchDispatchMode):
    """A GPU that is full at the operation of this number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [False, True])
def test_a_step_after_one_that_ran_out_of_memory_is_the_same(layers: bool) -> None:
    model = apply_patch(tiny_model(), layers=layers)
    batch = tiny_batch(model)
    expected = step(model, batch)
    with OutOfMemory(at=0) as operations:
        step(model, batch)
    for at in range(1, operations.count, operations.count // 40):
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(at):
            step(model, batch)
        model.zero_grad()
        found = step(model, batch)
        assert patch_status(model).fused
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_shift_labels_alone_give_no_loss_as_in_eager() -> None:
    model = tiny_model("qwen3_moe")
    batch = tiny_batch(model)
    batch["shift_labels"] = batch.pop("labels")
    eager = call(model, batch, output_router_logits=True)
    with patched(model):
        ours = call(model, batch, output_router_logits=True)
    assert ours.loss is eager.loss is None
    assert torch.equal(ours.aux_loss, eager.aux_loss)
    assert torch.equal(ours.logits, eager.logits)


# what to keep, and the same of the labels
MASK = torch.tensor([[False, True, True] * 3, [True, False, False] * 3])
EACH = torch.tensor([[0, 4, 5], [8, 1, 1]])
KEPT: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "last": (4, lambda labels: labels[:, -4:]),
    "all": (0, lambda labels: labels),
    "positions": (torch.tensor([1, 2, 5, 6]), lambda labels: labels[:, [1, 2, 5, 6]]),
    "no position": (torch.tensor([], dtype=torch.int64), lambda labels: labels[:, :0]),
    "positions of each": (EACH, lambda labels: labels.gather(1, EACH)),
    "mask": (MASK, lambda labels: labels[MASK]),
    "empty mask": (MASK & False, lambda labels: labels[MASK & False]),
}
takes_masks = pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "slice_logits_to_keep"),
    reason="this Transformers keeps the same positions of each sequence",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[takes_masks] if "each" in n or "mask" in n else []) for n in KEPT],
)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_to_keep_computes_the_loss_of_those(model_type: str, name: str) -> None:
    kept, choose = KEPT[name]
    model = widened(tiny_model(model_type))
    batch = tiny_batch(model)
    batch["labels"] = choose(batch["labels"])
    if isinstance(kept, Tensor):  # rows that are no neighbours: the labels of each are shifted
        batch["shift_labels"] = batch["labels"].contiguous()
    truth = step(model, batch, logits_to_keep=kept)
    logits = call(model, batch, logits_to_keep=kept).logits
    with patched(model):
        ours = step(model, batch, logits_to_keep=kept)
        deferred = call(model, batch, logits_to_keep=kept).logits
        assert patch_status(model).fused
    assert isinstance(deferred, DeferredLogits)
    assert not deferred.is_computed
    assert deferred.shape == logits.shape
    assert torch.equal(deferred, logits)
    if not batch["labels"].numel():  # eager's mean of no token is nan
        assert ours.pop("loss") == 0
        assert not any(gradient.any() for gradient in ours.values() if gradient is not None)
        return
    assert_no_worse(ours, truth, truth, torch.float32)
