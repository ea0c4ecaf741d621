"""What several files of tests with LoRA layers need."""

from typing import Any

import pytest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Which LoRA layers have run on kernels, and which by PEFT."""
    from lora_models import Calls  # skips where PEFT is not installed

    return Calls(monkeypatch)
