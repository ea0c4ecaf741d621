"""Calls that run without values: make_fx, torch.export and FakeTensorMode see the model's own head
and loss, and the status says why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_models import batch_of, make_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from liger_patch import apply_patch, patch_status

REASON = "runs the forward pass without values"
WARNS = pytest.mark.filterwarnings("ignore:liger_patch computes ordinary logits")
EXPORTS = pytest.mark.filterwarnings(
    "ignore:.*get_attr",  # torch 2.6
    "ignore:While compiling, we found certain side effects",  # the status of a strict export
)


def assert_not_fused(model: nn.Module) -> None:
    status = patch_status(model)
    assert status.fused is False
    assert REASON in str(status.reason)


class Outputs(nn.Module):
    """What is exported: a patched model's loss and logits."""

    def __init__(self, *, layers: bool) -> None:
        super().__init__()
        self.model = apply_patch(make_model("gemma2", patch=False), layers=layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(input_ids, labels=labels, use_cache=False)
        return outputs.loss, outputs.logits


@WARNS
@EXPORTS
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_has_the_ordinary_loss_and_logits(strict: bool) -> None:
    model = Outputs(layers=not strict)  # a strict export has the model's own layers
    tokens = torch.export.Dim("tokens", min=4, max=64)
    ids = torch.randint(3, 90, (2, 12))
    shapes = ({1: tokens}, {1: tokens})
    program: Any = torch.export.export(model, (ids, ids), dynamic_shapes=shapes, strict=strict)
    if not strict:  # a strict export runs none of the code that it traces
        assert_not_fused(model.model)
    for length in (5, 31):
        ids = torch.randint(3, 90, (2, length))
        loss, logits = program.module()(ids, ids)
        expected_loss, expected = model(ids, ids)
        torch.testing.assert_close(loss, expected_loss.to(loss.dtype))
        torch.testing.assert_close(logits, expected + 0.0)


def test_fake_tensors_have_the_shapes_of_the_ordinary_step() -> None:
    model = make_model()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.warns(UserWarning, match=REASON) as caught:
        outputs = [model(**batch_of(model)) for _ in range(2)]
    assert len(caught) == 1
    for each in outputs:
        assert type(each.loss) is type(each.logits) is FakeTensor
        assert each.logits.shape[-1] == model.config.vocab_size
    assert_not_fused(model)


def test_options_that_change_the_loss_are_an_error_there() -> None:
    model = apply_patch(make_model(patch=False), z_loss=1e-4)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="z_loss"):
        model(**batch_of(model))
