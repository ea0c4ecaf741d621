"""Where a test runs: on the CPU, on the CPU under Triton's interpreter, or on a GPU. Fixtures of
several files.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

torch.set_num_threads(1)  # pytest-xdist starts a process per core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU: make test-gpu")
    not_interpreted = pytest.mark.skip(reason="needs TRITON_INTERPRET=1: make test")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter"):
            if not INTERPRETED:
                item.add_marker(not_interpreted)
            # Triton 3.2's interpreter makes numbers of arrays of one element
            item.add_marker(
                pytest.mark.filterwarnings(
                    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
                )
            )


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whichever tests run, and in whichever process."""
    torch.manual_seed(0)


FORMS = [
    pytest.param("cpu", id="pytorch"),
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]


def form(request: pytest.FixtureRequest) -> torch.device:
    if INTERPRETED and request.node.get_closest_marker("interpreter") is None:
        pytest.skip("with TRITON_INTERPRET=1 the CPU runs Triton's interpreter")
    return torch.device(request.param)


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


FLAGS = ("LIGER_PATCH_RETURN_LOGITS", "LIGER_PATCH_VERIFY", "LIGER_PATCH_CHUNK_MIB")


@pytest.fixture(scope="module")
def trl_is_imported() -> Iterator[None]:
    """Trainer collects garbage in each run: seconds over all that these imports make."""
    import datasets
    import trl

    for trainer in ("DPOTrainer", "KTOTrainer", "SFTTrainer"):
        getattr(trl, trainer)  # trl imports each when it is asked for
    datasets.disable_progress_bars()
    gc.freeze()
    yield
    gc.unfreeze()
    datasets.enable_progress_bars()


@pytest.fixture
def no_flag_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nothing_is_compiled() -> Iterator[None]:
    """Neither before the test nor, whatever becomes of it, behind it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The deferred logits that somebody has read."""
    from liger_patch.deferred.tensor import DeferredLogits

    read: list[Any] = []
    real_logits = DeferredLogits.real_logits

    def recorded(self: DeferredLogits) -> torch.Tensor:
        read.append(self)
        return real_logits(self)

    monkeypatch.setattr(DeferredLogits, "real_logits", recorded)
    return read
