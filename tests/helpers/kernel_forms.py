"""Forms of the kernels: PyTorch operations, Triton's interpreter on the CPU, Triton on a GPU."""

import dataclasses
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


def speed_up_interpreter() -> None:
    """Do once what the interpreter does anew for each launch, function, value or type of a kernel:
    patch triton.language (up to half of its time), look up dtypes, and check the shapes of blocks
    (a third of the rest, with the check of 32-bit sums for overflow, which small tests never have).
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
    numpy_dtype, dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = numpy_dtype_once
    block_type = interpreter.tl.block_type
    describe, described = block_type.__init__, {}

    def describe_once(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(size, "value", size) for size in shape))
        if key not in described:
            describe(self, element, shape)
            described[key] = vars(self)
        vars(self).update(described[key])

    block_type.__init__ = describe_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
