"""Where a test runs: on the CPU, on the CPU under Triton's interpreter, or on a GPU."""

import os

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
