"""Where a test runs: on the CPU, on the CPU under Triton's interpreter, or on a GPU. Fixtures of
several files.
"""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_forms import FORMS, INTERPRETED, form

KERNELS = Path(__file__).parent / "kernels"

torch.set_num_threads(1)  # pytest-xdist starts a process per core


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no other library for kernels alone."""
    if INTERPRETED and collection_path.suffix == ".py" and KERNELS not in collection_path.parents:
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU: make test-gpu")
    not_interpreted = pytest.mark.skip(reason="needs TRITON_INTERPRET=1: make test")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter"):
            assert KERNELS in item.path.parents, "where alone interpreter tests are collected"
            if not INTERPRETED:
                item.add_marker(not_interpreted)
            # Triton 3.2's interpreter makes numbers of arrays of one element
            item.add_marker(
                pytest.mark.filterwarnings(
                    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
                )
            )


def pytest_collection_finish() -> None:
    """Leave what imports and collection have made out of every garbage collection to come."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = terminalreporter.stats.get("passed", [])
    rows = sum("test_one_step_of_every_architecture" in report.nodeid for report in passed)
    if rows:
        terminalreporter.write_line(f"{rows} architectures of the registry computed eager's step")


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_not_collected() -> None:
    """Each collection would go over all that imports and the tests of other files have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whichever tests run, and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_flag_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LIGER_PATCH_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def small_batches_run_the_kernels_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of tests are small, and Hopper has other kernels for small ones."""
    monkeypatch.setattr("liger_patch.kernels.head.odds.SMALL_BATCH", 0)


@pytest.fixture(autouse=True)
def layers_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: without kernels, only layers that are asked for by name run there."""
    monkeypatch.setattr("liger_patch.layers.checks.DEVICES", ("cuda", "cpu", "meta"))


@pytest.fixture(params=FORMS)
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device for each form of the kernels: PyTorch operations, Triton's interpreter, Triton on a
    GPU.
    """
    return form(request)


@pytest.fixture(params=FORMS[:2])
def cpu_form(request: pytest.FixtureRequest) -> torch.device:
    """`device` without the GPU, where every variant of a kernel costs a compilation."""
    return form(request)


@pytest.fixture(params=FORMS[::2])
def quick_device(request: pytest.FixtureRequest) -> torch.device:
    """`device` without Triton's interpreter, for what the host does whatever the kernels."""
    return form(request)


@pytest.fixture(scope="module")
def imported_objects_are_not_collected() -> None:
    """Trainer collects garbage in each run: 0.5 s over all that the imports have made."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    gc.freeze()


@pytest.fixture
def nothing_is_compiled() -> Iterator[None]:
    """Neither before the test nor, whatever becomes of it, behind it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> Any:
    """A tiny Llama."""
    from tiny_models import LLAMA, tiny_model

    return tiny_model(LLAMA)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A function that replaces ``owner.name`` by one that also notes its calls: their positional
    arguments, or what ``note`` makes of all.
    """

    def record(
        owner: Any, name: str, note: Callable[..., Any] = lambda *args, **_: args
    ) -> list[Any]:
        own, noted = getattr(owner, name), []

        def function(*args: Any, **kwargs: Any) -> Any:
            noted.append(note(*args, **kwargs))
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, function)
        return noted

    return record


@pytest.fixture
def reads(record: Callable[..., list[Any]]) -> list[Any]:
    """The deferred logits that somebody has read."""
    from liger_patch.deferred.tensor import DeferredLogits

    return record(DeferredLogits, "real_logits")
