"""What tests of kernels need: memory that is NaN where nothing was written, and odds."""

from collections.abc import Iterator

import pytest
import torch
from kernel_forms import FORMS, INTERPRETED, patch_triton_once

patch_triton_once()


@pytest.fixture(autouse=True)
def empty_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a kernel does not write is seen, on the CPU: what was there before may be right."""
    if torch.cuda.is_available():  # whose products would want an environment of their own
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=FORMS[1:])
def odds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[torch.device, torch.dtype]]:
    """Device and dtype that odds are computed in; a test in which none are fails."""
    from odds_cases import IS_HOPPER  # skips where Triton is not installed

    from liger_patch.kernels.head import hopper, odds_inputs

    if INTERPRETED and request.param == "cpu":
        monkeypatch.setattr(odds_inputs, "serves_odds", lambda *_: True)
    elif not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    computed = []
    run = hopper.OddsForm.run

    def counted(self, *args, **how):
        computed.append(self)
        run(self, *args, **how)

    monkeypatch.setattr(hopper.OddsForm, "run", counted)
    dtype = torch.float32 if request.param == "cpu" else torch.bfloat16
    yield torch.device(request.param), dtype
    assert computed
