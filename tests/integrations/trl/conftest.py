"""What every test with TRL needs."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def trl_is_imported() -> Iterator[None]:
    """Trainer collects garbage in each run: seconds over all that these imports make."""
    import datasets
    import trl

    for trainer in ("DPOTrainer", "KTOTrainer", "SFTTrainer"):
        getattr(trl, trainer)  # trl imports each when it is asked for
    datasets.disable_progress_bars()
    gc.freeze()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def trls_calls(record: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the functions that compute TRL's own heads, and losses of distillation."""
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer import distillation_trainer, utils

    calls: list[Any] = []

    def note(*given: Any, **_: Any) -> None:
        calls.append(given)

    record(utils._ChunkedLogProbFunction, "apply", note)
    record(distillation_trainer, "_chunked_divergence_loss", note)
    record(GKDTrainer, "generalized_jsd_loss", note)
    noted: Any = GKDTrainer.generalized_jsd_loss
    monkeypatch.setattr(GKDTrainer, "generalized_jsd_loss", staticmethod(noted))
    return calls
