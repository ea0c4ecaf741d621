"""What tests of kernels need: memory that is NaN where nothing was written, the tensors that graphs
keep, and odds.
"""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from kernel_forms import FORMS, INTERPRETED, form, speed_up_interpreter

speed_up_interpreter()


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
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """`device` without PyTorch's operations, for what only kernels compute."""
    return form(request)


@pytest.fixture
def kept() -> Iterator[list[torch.Tensor]]:
    """What graphs of the test keep for their backward passes."""
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        yield found


OddsForm = Literal["hopper", "rows"]
Odds = Iterator[tuple[torch.device, torch.dtype]]
ROW_BLOCK_V = 32  # of the interpreter's rows: several blocks of the tests' 131 classes


def computing_odds(
    form: OddsForm, device: str, monkeypatch: pytest.MonkeyPatch, record: Any
) -> Odds:
    """Yield device and dtype that odds are computed in; a test in which none are fails. The
    interpreter multiplies no bf16.
    """
    from odds_cases import IS_HOPPER  # skips where Triton is not installed

    from liger_patch.kernels.head import odds
    from liger_patch.kernels.triton import row_odds as kernels

    is_interpreter = device == "cpu"
    if is_interpreter and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    if form == "hopper":
        computes, name = odds.OddsForm, "run"
        if is_interpreter:
            monkeypatch.setattr(odds, "serves_odds", lambda *_: True)
        elif not IS_HOPPER:
            pytest.skip("needs a Hopper GPU")
    else:
        computes, name = odds.RowOddsForm, "_turn"
        monkeypatch.setattr(odds, "serves_odds", lambda *_: False)
        if is_interpreter:
            serves = odds.has_whole_rows
            monkeypatch.setattr(odds, "serves_row_odds", lambda operands, _: serves(operands))
            for block in (kernels.BLOCK, kernels.BLOCK_WITH_SOFTCAP):
                monkeypatch.setitem(block, "BLOCK_V", ROW_BLOCK_V)
    computed = record(computes, name, lambda self, *_, **__: self)  # holds no tensors
    yield torch.device(device), torch.float32 if is_interpreter else torch.bfloat16
    assert computed


@pytest.fixture(params=FORMS[1:])
def odds(request, monkeypatch, record) -> Odds:
    """Odds of Hopper's kernels."""
    yield from computing_odds("hopper", request.param, monkeypatch, record)


@pytest.fixture(params=FORMS[1:])
def row_odds(request, monkeypatch, record) -> Odds:
    """Odds of other GPUs' kernel."""
    yield from computing_odds("rows", request.param, monkeypatch, record)


@pytest.fixture(params=FORMS[1:])
def both_odds(request, monkeypatch, record, odds_form) -> Odds:
    """Odds of the kernels that ``odds_form`` names."""
    yield from computing_odds(odds_form, request.param, monkeypatch, record)


@pytest.fixture(params=["hopper", "rows"])
def odds_form(request: pytest.FixtureRequest) -> OddsForm:
    return request.param
