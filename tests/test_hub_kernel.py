"""The kernel for Hugging Face's Hub: it loads without liger_patch, and computes the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import liger_patch
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

SCRIPT = Path(__file__).parent / "hub_kernel.py"
VARIANT = "build/torch-universal"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """As ``make hub-kernel`` writes it."""
    place = tmp_path / "hub-kernel"
    subprocess.run([sys.executable, str(SCRIPT), "--output", str(place)], check=True)
    return place


def load(repository: Path) -> ModuleType:
    """As ``kernels`` imports what it has downloaded."""
    name = json.loads((repository / VARIANT / "metadata.json").read_text())["id"]
    file = repository / VARIANT / "liger_patch" / "__init__.py"
    spec: Any = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def loss_and_gradients(operator: Callable[..., Any], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(dtype) for n in (21, 37))
    labels = torch.randint(37, (21,), generator=generator)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = operator(*leaves, labels, softcap=3.0)
    return [loss, *torch.autograd.grad(loss, leaves)]


def test_the_kernel_computes_what_the_package_does(repository: Path) -> None:
    kernel = load(repository)
    assert len(kernel.__all__) == 6
    for name in kernel.__all__:
        assert getattr(kernel, name).__module__ == f"{kernel.__name__}.{name}"
    assert hasattr(getattr(torch.ops, kernel.__name__), "linear_cross_entropy")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found = loss_and_gradients(kernel.linear_cross_entropy, dtype)
        expected = loss_and_gradients(linear_cross_entropy, dtype)
        assert all(map(torch.equal, found, expected))


def test_every_module_of_the_kernel_imports_without_the_package(repository: Path) -> None:
    """Also those that functions import."""
    variant = repository / VARIANT
    files = sorted((variant / "liger_patch").rglob("*.py"))
    text = "\n".join(each.read_text(encoding="utf-8") for each in files)
    assert not re.search(r"^ *(from|import) liger_patch|liger_patch::|ops\.liger_patch", text, re.M)
    names = [".".join(each.relative_to(variant).with_suffix("").parts) for each in files]
    assert {"liger_patch.head.odds", "liger_patch.triton.odds"} <= set(names)
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += "import liger_patch; print(liger_patch.__file__)"
    environment = os.environ | {"PYTHONPATH": str(variant)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(variant / "liger_patch" / "__init__.py")
    assert done.stdout.strip() != liger_patch.__file__
