"""Forms of the kernels: PyTorch operations, Triton's interpreter on the CPU, Triton on a GPU."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMS = [
    pytest.param("cpu", id="pytorch"),
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]


def form(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of a fixture with FORMS as its params."""
    if INTERPRETED and request.node.get_closest_marker("interpreter") is None:
        pytest.skip("with TRITON_INTERPRET=1 the CPU runs Triton's interpreter")
    return torch.device(request.param)
