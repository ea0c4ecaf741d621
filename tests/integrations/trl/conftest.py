"""What every test with TRL needs."""

import gc
from collections.abc import Iterator

import pytest

FLAGS = ("LIGER_PATCH_RETURN_LOGITS", "LIGER_PATCH_VERIFY", "LIGER_PATCH_CHUNK_MIB")


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


@pytest.fixture(autouse=True)
def no_flag_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)
