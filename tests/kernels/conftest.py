from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def empty_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a kernel does not write is seen, on the CPU: what was there before may be right."""
    if torch.cuda.is_available():  # whose products would want an environment of their own
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)
