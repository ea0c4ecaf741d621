"""A norm that is left to the rotary embedding has its values for whatever else uses it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_patch.kernels.rms_norm import NormInputs
from liger_patch.layers.normed_heads import UncomputedNorm, rotated_norms

X = torch.linspace(-1.0, 2.0, 2 * 3 * 4 * 8).view(2, 3, 4, 8)
USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda y: y.shape,
    "method": lambda y: y.view(2, 3, 32),
    "transposed features": lambda y: y.transpose(2, -1),
    "transposed, then used": lambda y: y.transpose(1, 2) + 1.0,
    "transposed after use": lambda y: (y.sum(), y.transpose(dim0=1, dim1=2))[1],
    "operator": lambda y: 2.0 * y - 1.0,
    "both operands": lambda y: y * y,
    "of a tensor": lambda y: X + y,
    "function": lambda y: torch.cat((y, X), -1),
    "keyword": lambda y: torch.add(input=X, other=y),
    "comparison": lambda y: y == y.computed(),
    "greater": lambda y: y > 0.5,
    "item": lambda y: y[..., :4],
    "length": len,
    "iteration": lambda y: [each.sum() for each in y],
    "in place": lambda y: y.mul_(2.0),
    "augmented": lambda y: operator.iadd(y, X),
    "negative": operator.neg,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_uses_an_uncomputed_norm_computes_it(use: Callable[[Any], Any]) -> None:
    inputs = NormInputs(X, torch.linspace(0.5, 2.0, 8), 1e-6, 1.0, torch.float32)
    ours, expected = use(UncomputedNorm(inputs)), use(_OfTensor(inputs.norm()))
    if isinstance(ours, list):
        ours, expected = torch.stack(ours), torch.stack(expected)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, expected)
    else:
        assert ours == expected


class _OfTensor:
    """A tensor that says what it is where a use asks an uncomputed norm for it."""

    def __new__(cls, value: Tensor) -> Any:
        value.computed = lambda: value  # pyright: ignore[reportAttributeAccessIssue]
        return value


def test_an_uncomputed_norm_keeps_the_gradient_mode_of_its_call() -> None:
    x = X.clone().requires_grad_()
    y: Any = UncomputedNorm(NormInputs(x, None, 1e-6, 0.0, torch.float32))
    with torch.no_grad():
        assert y.abs().max() > 0
    torch.autograd.grad((y * y).sum(), x)
    with torch.no_grad():
        q, k = (UncomputedNorm(NormInputs(x, None, 1e-6, 0.0, torch.float32)) for _ in range(2))
    assert rotated_norms(q, k, *torch.randn(2, 1, 4, 8)) is None
    assert not q.computed().requires_grad


def test_norms_that_were_read_are_not_computed_again() -> None:
    q, k = (UncomputedNorm(NormInputs(X, None, 1e-6, 0.0, torch.float32)) for _ in range(2))
    tables = torch.randn(2, 1, 4, 8)
    assert rotated_norms(q, k, *tables) is not None
    values = q.computed()
    assert q.computed() is values
    assert rotated_norms(q, k, *tables) is None
    assert rotated_norms(k, X, *tables) is None
