"""What several files of tests with LoRA layers need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lora_models import Calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Which LoRA layers have run on kernels, and which by PEFT."""
    from lora_models import Calls  # skips where PEFT is not installed

    return Calls(monkeypatch)
