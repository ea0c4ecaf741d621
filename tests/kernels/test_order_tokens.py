"""Supervised tokens to the front, in one launch that writes all of its results."""

from collections.abc import Iterator

import pytest
import torch
from slow_cases import each_pair

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _memory_is_filled() -> Iterator[None]:
    """New memory holds nan, and integers that are no position."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_pair(
    dtype=[torch.int64, torch.int32, torch.int16],
    ignored=[0.0, 0.4, 1.0],
    tokens=[0, 1, 2048, 4111],
)
def test_all_results_are_written(tokens, ignored, dtype, kernel_device):
    from liger_patch.kernels.triton.labels import order_tokens

    labels = torch.randint(140, (tokens,), dtype=dtype)
    labels[torch.rand(tokens) < ignored] = -100
    places = (labels != -100).nonzero().flatten()
    n = len(places)
    ordered, rows, counts, means = order_tokens(labels.to(kernel_device), 131, -100)
    zeros = torch.zeros(tokens - n, dtype=torch.int64)
    assert torch.equal(rows.cpu(), torch.cat([places, zeros]))
    assert torch.equal(ordered.cpu(), torch.cat([labels[places].to(torch.int64), zeros]))
    assert counts.tolist() == [n, int((labels >= 131).sum())]
    assert torch.equal(means.cpu(), torch.ones(tokens) / max(n, 1))
