"""What several files of tests need."""

import gc

import pytest

from liger_patch import registry


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_not_collected() -> None:
    """A collection takes 0.3 s over what the tests of other files have left."""
    gc.freeze()


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No architecture is tested."""
    monkeypatch.setattr(registry, "ARCHITECTURES", ())
