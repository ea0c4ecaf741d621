"""The class of docs/integrations.md in Lightning's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks
from tiny_models import tiny_batch, tiny_model
from torch.utils.data import DataLoader

from liger_patch import patch_status

pytest.importorskip("lightning", reason="needs lightning")

from lightning.pytorch import Callback, Trainer


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.kept.append(outputs["loss"].item())


def class_in_the_docs() -> Any:
    """``Model``, with a learning rate that a tiny model needs."""
    (code,) = (block.code for block in blocks() if block.place == "integrations.md: Lightning")
    assert "lr=1e-5" in code
    names: dict[str, Any] = {}
    exec(code.replace("lr=1e-5", "lr=1e-2"), names)
    return names["Model"]


# Lightning 2.6 with torch 2.13
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_class_in_the_docs_trains_fused(precision: Any, tmp_path: Path) -> None:
    plain = tiny_model()
    plain.save_pretrained(tmp_path)
    batch = tiny_batch(plain, batch=4)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=5,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module = class_in_the_docs()(str(tmp_path))
    trainer.fit(module, DataLoader([batch], batch_size=None))
    assert patch_status(module.model).fused
    assert module.model.training
    if precision == "32-true":
        with torch.no_grad():
            assert losses.kept[0] == pytest.approx(plain.train()(**batch).loss.item(), rel=1e-5)
    assert losses.kept[-1] < losses.kept[0] - 0.1
    # Lightning may call it again
    before = module.model
    module.configure_model()
    assert module.model is before
