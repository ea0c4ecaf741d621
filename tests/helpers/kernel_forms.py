"""Forms of the kernels: PyTorch operations, Triton's interpreter on the CPU, Triton on a GPU."""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

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


def patch_triton_once() -> None:
    """Spare the interpreter up to half of its time: it patches triton.language for each launch, and
    again for each function that a kernel calls.
    """
    if not INTERPRETED or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()
    never_restored = SimpleNamespace(restore=lambda: None)

    def patch_once(function: Any) -> SimpleNamespace:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return never_restored

    interpreter._patch_lang = patch_once
