"""The report of ``python -m liger_patch doctor``, and its exit status."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import liger_patch
from liger_patch.__main__ import main
from liger_patch.cli import doctor

Ran = Callable[[], tuple[int, str]]


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs the command: its exit status, and what it has printed."""
    return lambda: (main(["doctor"]), capsys.readouterr().out)


def test_this_machine_passes_also_where_variables_ask_for_logits(
    monkeypatch: pytest.MonkeyPatch, ran: Ran, record: Callable[..., list[bool]]
) -> None:
    """The report runs the kernels for Hopper, and those for other GPUs."""
    asked = record(liger_patch, "linear_cross_entropy", lambda *_, hopper_kernels: hopper_kernels)
    monkeypatch.setenv("LIGER_PATCH_CHUNK_MIB", "64")
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    status, printed = ran()
    assert status == 0
    assert asked[:2] == [True, False]
    assert f"torch        {metadata.version('torch')}" in printed
    assert "LIGER_PATCH_CHUNK_MIB=64" in printed
    assert "LIGER_PATCH_RETURN_LOGITS=1" in printed
    assert "\ncpu\n" in printed
    assert "operator, float32    right" in printed
    assert "model, float32       right" in printed
    assert printed.endswith("all tests passed\n")


def test_versions_that_are_newer_than_the_tested_ones_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"torch": "2.13.0+cpu", "triton": "3.10.0", "trl": "1.16.0.dev0"}
    monkeypatch.setattr(metadata, "version", installed.__getitem__)
    assert doctor._version("torch", "2.13.0") == "2.13.0+cpu"
    assert doctor._version("triton", "3.9.1") == "3.10.0, newer than the tested 3.9.1"
    assert doctor._version("trl", "1.16.0") == "1.16.0.dev0"
    pins = Path(__file__).parents[2] / "constraints.txt"
    assert {f"{name}=={version}" for name, version in doctor.PACKAGES.items()} <= {
        *pins.read_text(encoding="utf-8").splitlines()
    }


def test_wrong_gradients_fail(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    right = liger_patch.linear_cross_entropy

    def wrong(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
        loss = right(hidden, weight, labels, **options)
        return loss + 0.001 * (hidden.sum() - hidden.sum().detach())  # of gradients alone

    monkeypatch.setattr(liger_patch, "linear_cross_entropy", wrong)
    status, printed = ran()
    assert status == 1
    assert "operator, float32    WRONG:" in printed
    assert "times the error that is allowed" in printed
    assert "model, float32       right" in printed


def test_an_unpatched_model_fails(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.setattr(liger_patch, "apply_patch", lambda model: model)
    status, printed = ran()
    assert status == 1
    assert "the loss of the patched model was not fused" in printed


def test_an_error_has_no_paths(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    home = str(Path.home() / "secret")

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(f"cannot open '{home}/kernel.so'")

    monkeypatch.setattr(liger_patch, "linear_cross_entropy", broken)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", home)
    status, printed = ran()
    assert status == 1
    assert "WRONG: OSError: cannot open '<path>'" in printed
    assert "PYTORCH_CUDA_ALLOC_CONF=<path>" in printed
    assert "secret" not in printed
    assert f"/{getpass.getuser()}/" not in printed
