"""Tiny models whose memory is estimated, and the steps that they train."""

from __future__ import annotations

from typing import Any

import pytest

from liger_patch.estimate.model import TrainingStep

HIDDEN, SIZE, VOCABULARY, LAYERS, TOKENS = 64, 256, 4096, 2, 512
STEP = TrainingStep(length=TOKENS, autocast=None, optimizer="none")
TINY: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
PEFTS_WARNINGS = pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys:RuntimeWarning",
    "ignore:Unsupported layer type:UserWarning",  # PEFT 0.18
)
