"""What several files of tests of architectures without a row need."""

import pytest

from liger_patch import registry


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No architecture is tested."""
    monkeypatch.setattr(registry, "ARCHITECTURES", ())
