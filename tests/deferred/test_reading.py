"""Reading deferred logits: whatever is asked of them, the answer is that of the eager logits."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_logits import LLAMA, assert_same, outcome, outputs_of, unlike
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn

from liger_patch import apply_patch, patch_status
from liger_patch.deferred.tensor import DeferredLogits

METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "size": lambda x: (x.size(), x.size(-1), x.size(dim=0)),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "get_device": lambda x: x.get_device(),
    "ndim": lambda x: (x.ndim, x.dim(), x.ndimension()),
    "len": len,
    "numel": lambda x: (x.numel(), x.nelement(), torch.numel(x)),
    "element_size": lambda x: (x.element_size(), x.itemsize, x.nbytes),
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "is_leaf": lambda x: x.is_leaf,
    "stride": lambda x: (x.stride(), x.stride(-1)),
    "is_contiguous": lambda x: x.is_contiguous(),
    "is_floating_point": lambda x: (x.is_floating_point(), torch.is_floating_point(x)),
    "is_complex": lambda x: (x.is_complex(), torch.is_complex(x)),
    "is_inference": lambda x: x.is_inference(),
    "is_cuda": lambda x: (x.is_cuda, x.is_cpu, x.is_meta, x.is_sparse, x.is_quantized),
    "layout": lambda x: x.layout,
    "is_tensor": lambda x: (torch.is_tensor(x), isinstance(x, Tensor)),
    "of a slice": lambda x: (x[:, :-1].shape, x[:, :-1].stride(), x[0].requires_grad),
    "of a slice of a slice": lambda x: (x[:, 1:][..., ::2, :].stride(), x[:, 0].is_contiguous()),
    "of a view": lambda x: (x.view(-1, V).shape, x.float().dtype, x.bfloat16().dtype),
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


def to_file(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return torch.load(file)


# those that are recorded, each in all its forms; and some of the ordinary way of all others
READINGS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "numpy": lambda x: x.detach().numpy(),
    "numpy of what needs a gradient": lambda x: outcome(x.numpy),
    "numpy forced": lambda x: x.numpy(force=True),
    "item": lambda x: x[0, 0, 0].item(),
    "float()": lambda x: float(x.detach().sum()),
    "bool()": lambda x: bool(x.sum() > 0),
    "iteration": list,
    "membership": lambda x: 3.0 in x,
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "transpose": lambda x: x.mT,
    "flatten": lambda x: x.flatten(),
    "flatten tokens": lambda x: x.flatten(0, 1),
    "clone": lambda x: x.clone(),
    "cpu": lambda x: x.cpu(),
    "double": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "data": lambda x: x.data,
    "detach": lambda x: x.detach() + 0,
    "detached, in place": lambda x: x.detach().zero_(),
    "type": lambda x: x.type(torch.float64),
    "to dtype": lambda x: x.to(torch.float16),
    "to dtype by name": lambda x: x.to(dtype=torch.float16),
    "to device": lambda x: x.to("cpu"),
    "to device and dtype": lambda x: x.to("cpu", torch.float16),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "to other": lambda x: x.to(torch.zeros(1, dtype=torch.bfloat16)),
    "to meta": lambda x: x.to("meta").shape,
    "to non_blocking": lambda x: x.to("cpu", non_blocking=True),
    "add tensor": lambda x: x + unlike(x),
    "tensor add": lambda x: unlike(x) + x,
    "number times": lambda x: 3 * x,
    "times number": lambda x: x * 3,
    "times tensor": lambda x: x * torch.tensor(2.0),
    "times itself": lambda x: x * x,
    "times bool": lambda x: x * True,
    "over number": lambda x: x / 7,
    "over zero": lambda x: x / 0,
    "over tensor": lambda x: x / torch.tensor(7.0),
    "floor division": lambda x: x // 0.1,
    "rounded division": lambda x: torch.div(x, 0.1, rounding_mode="trunc"),
    "tanh": lambda x: x.tanh(),
    "softcap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "tanh of tanh": lambda x: x.tanh().tanh(),
    "equal": lambda x: x == x[0],
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "cat of slices": lambda x: torch.cat([x[:, :2], x[:, 5:]], dim=1),
    "pad": lambda x: nn.functional.pad(x, (0, 1)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "torch.save": to_file,
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle with its gradient": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy with its gradient": lambda x: outcome(lambda: copy.deepcopy(x)),
    "torch.save of a slice": lambda x: to_file(x[:, -1]),
    "torch.save of steps": lambda x: to_file(torch.tanh(x / 3).bfloat16()),
    "slice on the cpu": lambda x: x[:, 1:].detach().cpu().tolist(),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "by name: tanh": lambda x: torch.tanh(input=x),
    "by name: method": lambda x: x.mul(other=2),
    "by name: reshape": lambda x: torch.reshape(input=x, shape=(-1, V)),
    "by name: view": lambda x: x.view(size=(-1, V)),
    "by name: float": lambda x: x.float(memory_format=torch.preserve_format),
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.empty(x.shape)),
    "view of dtype": lambda x: x.detach().view(torch.int32),
    "view as": lambda x: x.view_as(torch.empty(18, V)),
    "view of all": lambda x: x.view(-1),
    "view apart": lambda x: x.view(2, 3, 3, V),
    "view of sizes": lambda x: x.view(torch.Size([18, V])),
    "view of a slice that is none": lambda x: outcome(lambda: x[:, 1:].view(-1, V)),
    "view that does not fit": lambda x: outcome(lambda: x.view(-1, 4, V)),
    "reshape across": lambda x: x.reshape(-1, 9),
    "reshape to the last": lambda x: x.reshape(18, -1),
    "flatten of a slice": lambda x: torch.flatten(x[:, 1:], end_dim=-2),
    "flatten of one": lambda x: x.flatten(1, 1),
    "flatten of no row": lambda x: x[:0].flatten(0, 1),
    "flatten across": lambda x: (x.flatten(), x.flatten(1), x.flatten(start_dim=-2)),
    "flatten that does not fit": lambda x: outcome(lambda: x.flatten(1, 0)),
    "by name: flatten": lambda x: torch.flatten(input=x, start_dim=0, end_dim=1),
    "cast by type": lambda x: (x.type(torch.bfloat16), x.double(), x.type()),
    "view of a slice": lambda x: x[:, 1:].reshape(-1, V)[3:5],
    "nested views": lambda x: x[:, 1:][1].view(4, 2, V)[2, 1].float(),
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


def test_a_traced_forward_pass_computes_ordinary_logits() -> None:
    class Loss(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.model(input_ids=input_ids, labels=labels)
            return outputs.loss, outputs.logits

    model = tiny_model(LLAMA)
    batch = tiny_batch(model)
    arguments = batch["input_ids"], batch["labels"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.jit.trace(Loss(model), arguments, check_trace=False)(*arguments)
        traced = torch.jit.trace(Loss(apply_patch(model)), arguments, check_trace=False)
        torch.testing.assert_close(traced(*arguments), expected)
    assert patch_status(model).reason == "torch.jit.trace records the forward pass"
