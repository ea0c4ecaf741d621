"""Reading deferred logits: whatever is asked of them or of the outputs that hold them, by whatever
index, the answer is that of the eager logits.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_logits import MASK, assert_same, outcome, outputs_of, unlike
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch
from torch import Tensor

from liger_patch import apply_patch, patch_status
from liger_patch.deferred.tensor import DeferredLogits

METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "size": lambda x: (x.size(), x.size(-1), x.size(dim=0)),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "ndim": lambda x: (x.ndim, x.dim(), x.ndimension()),
    "len": len,
    "numel": lambda x: (x.numel(), x.nelement(), torch.numel(x)),
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "is_leaf": lambda x: x.is_leaf,
    "stride": lambda x: (x.stride(), x.stride(-1)),
    "is_contiguous": lambda x: x.is_contiguous(),
    "is_cuda": lambda x: (x.is_cuda, x.is_cpu, x.is_meta, x.is_sparse, x.is_quantized),
    "layout": lambda x: x.layout,
    "of a slice": lambda x: (x[:, :-1].shape, x[:, :-1].stride(), x[0].requires_grad),
    "flattened": lambda x: (x.flatten(0, 1).shape, torch.flatten(x, end_dim=-2).stride()),
    "of a detached": lambda x: (x.detach().requires_grad, x.detach().shape),
    "moved": lambda x: (x.to("meta").device, x.to("meta", non_blocking=True)[:, 1:].shape),
    "of a product": lambda x: ((x * 2).shape, (x / 3).dtype, x.tanh().requires_grad),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_answered_without_values(
    deferred: DeferredLogits, eager: Tensor, name: str
) -> None:
    assert METADATA[name](deferred) == METADATA[name](eager)
    assert not deferred.is_computed
    deferred + 0
    assert deferred.is_computed
    assert METADATA[name](deferred) == METADATA[name](eager)


def test_the_hash_stays_when_the_logits_are_read(deferred: DeferredLogits) -> None:
    names = {deferred: "logits"}
    deferred + 0
    assert names[deferred] == "logits"


# those that are recorded, each in all its forms; and some of the ordinary way of all others
READINGS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "numpy": lambda x: x.detach().numpy(),
    "numpy of what needs a gradient": lambda x: outcome(x.numpy),
    "item": lambda x: x[0, 0, 0].item(),
    "iteration": list,
    "softmax": lambda x: x.softmax(-1),
    "transpose": lambda x: x.mT,
    "flatten tokens": lambda x: x.flatten(0, 1),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "data": lambda x: x.data,
    "detach": lambda x: x.detach() + 0,
    "type": lambda x: x.type(torch.float64),
    "to dtype": lambda x: x.to(torch.float16),
    "to device": lambda x: x.to("cpu"),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "to non_blocking": lambda x: x.to("cpu", non_blocking=True),
    "add tensor": lambda x: x + unlike(x),
    "times number": lambda x: x * 3,
    "times tensor": lambda x: x * torch.tensor(2.0),
    "times itself": lambda x: x * x,
    "over number": lambda x: x / 7,
    "floor division": lambda x: x // 0.1,
    "over tensor": lambda x: x / torch.tensor(7.0),
    "tanh": lambda x: x.tanh(),
    "softcap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "cat of slices": lambda x: torch.cat([x[:, :2], x[:, 5:]], dim=1),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle with its gradient": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy with its gradient": lambda x: outcome(lambda: copy.deepcopy(x)),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "by name: tanh": lambda x: torch.tanh(input=x),
    "by name: reshape": lambda x: torch.reshape(input=x, shape=(-1, V)),
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.empty(x.shape)),
    "view of dtype": lambda x: x.detach().view(torch.int32),
    "view of all": lambda x: x.view(-1),
    "view apart": lambda x: x.view(2, 3, 3, V),
    "view of a slice that is none": lambda x: outcome(lambda: x[:, 1:].view(-1, V)),
    "view that does not fit": lambda x: outcome(lambda: x.view(-1, 4, V)),
    "reshape across": lambda x: x.reshape(-1, 9),
    "flatten of a slice": lambda x: torch.flatten(x[:, 1:], end_dim=-2),
    "flatten across": lambda x: (x.flatten(), x.flatten(1), x.flatten(start_dim=-2)),
    "flatten that does not fit": lambda x: outcome(lambda: x.flatten(1, 0)),
    "by name: flatten": lambda x: torch.flatten(input=x, start_dim=0, end_dim=1),
    "view of a slice": lambda x: x[:, 1:].reshape(-1, V)[3:5],
    "cast and back": lambda x: x.bfloat16().float(),
    "cast, cap, cut": lambda x: (torch.tanh(x.bfloat16() / 2) * 2).float()[:, :-1],
}


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_is_eagers(deferred: DeferredLogits, eager: Tensor, name: str) -> None:
    read = READINGS[name]
    assert_same(read(deferred), read(eager))
    assert_same(read(deferred), read(eager))  # now that they are computed
    assert_same(deferred + 0, eager + 0)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__
)
def test_logits_can_be_read_in_another_mode_than_they_were_made_in(mode: Any) -> None:
    with mode():
        ours, expected = outputs_of(True).logits, outputs_of(False).logits
        inside, expected_inside = ours[:, 1:], expected[:, 1:]
    assert_same(ours, expected)
    assert_same(ours * 2 + 1, expected * 2 + 1)
    assert_same(inside.softmax(-1), expected_inside.softmax(-1))
    with torch.no_grad():
        assert_same(ours * 3, expected * 3)


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16])
def test_logits_read_after_autocast_are_those_of_autocast(device_dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=device_dtype):
        ours, expected = outputs_of(True).logits, outputs_of(False).logits
    assert ours.dtype == expected.dtype == device_dtype
    assert_same(ours + 0, expected + 0)


def test_a_traced_forward_pass_computes_ordinary_logits(model: Any) -> None:
    class Loss(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.model(input_ids=input_ids, labels=labels)
            return outputs.loss, outputs.logits

    batch = tiny_batch(model)
    arguments = batch["input_ids"], batch["labels"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.jit.trace(Loss(model), arguments, check_trace=False)(*arguments)
        traced = torch.jit.trace(Loss(apply_patch(model)), arguments, check_trace=False)
        torch.testing.assert_close(traced(*arguments), expected)
    assert patch_status(model).reason == "torch.jit.trace records the forward pass"


def test_a_tuple_of_outputs_holds_loss_and_logits() -> None:
    expected = outputs_of(False, return_dict=False)
    for ours in (outputs_of(True, return_dict=False), outputs_of(True).to_tuple()):
        assert type(ours) is tuple
        assert not ours[1].is_computed
        torch.testing.assert_close(ours[0], expected[0])
        assert_same(ours[1], expected[1])


def test_the_output_class_holds_the_logits_beside_eagers_others() -> None:
    ours, expected = (outputs_of(patch, output_hidden_states=True) for patch in (True, False))
    assert not ours.logits.is_computed
    assert type(ours) is type(expected)
    assert list(ours) == list(expected)
    assert_same(ours.hidden_states, expected.hidden_states)
    for logits in (ours["logits"], ours[1], dict(ours)["logits"]):
        assert_same(logits, expected.logits)


def test_outputs_can_be_pickled_and_copied() -> None:
    expected = outputs_of(False).logits.detach()
    with torch.no_grad():
        outputs = outputs_of(True)
    for again in (pickle.loads(pickle.dumps(outputs)), copy.deepcopy(outputs)):
        assert type(again.logits) is Tensor
        assert torch.equal(again.logits, expected)


INDICES: dict[str, Any] = {
    "int": 0,
    "ints": (1, 2),
    "slice": slice(1, None),
    "slice of the vocabulary": (slice(None), slice(None), slice(0, 7)),
    "one word": (slice(None), slice(None), 5),
    "ellipsis, last": (..., -1),
    "ellipsis, rows": (..., slice(None, -1), slice(None)),
    "row, ellipsis": (1, ...),
    "three ints, ellipsis": (1, 2, 3, ...),
    "None": None,
    "slice, None": (slice(None), None),
    "bool tensor": torch.tensor(True),
    "mask of tokens": MASK,
    "mask of sequences": torch.tensor([True, False]),
    "mask, all": (MASK, slice(None)),
    "mask, word": (MASK, 5),
    "mask of the vocabulary": (..., torch.arange(V) % 2 == 0),
    "mask of all": torch.arange(2 * 9 * V).view(2, 9, V) % 3 == 0,
    "row, mask": (1, MASK[0]),
    "empty mask": torch.zeros_like(MASK),
    "indices": torch.tensor([1, 0, 1]),
    "pairs of indices": (torch.tensor([0, 1]), torch.tensor([3, 4])),
    "three of indices": (torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([5, 6])),
    "list": [1, 0],
    "last of each": (torch.arange(2), torch.tensor([5, 7])),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_is_eagers(deferred: DeferredLogits, eager: Tensor, name: str) -> None:
    index = INDICES[name]
    ours, expected = outcome(lambda: deferred[index]), outcome(lambda: eager[index])
    assert_same(ours, expected)
    if isinstance(expected, Tensor):
        assert_same(ours * 2, expected * 2)
    assert_same(outcome(lambda: (deferred + 0)[index]), expected)


@pytest.mark.parametrize("index", [5, (0, 99), (0, 0, V), (0, 0, 0, 0), "word", 1.5])
def test_an_index_that_is_an_error_stays_one(deferred: DeferredLogits, index: Any) -> None:
    with pytest.raises((IndexError, TypeError)):
        deferred[index] + 0
