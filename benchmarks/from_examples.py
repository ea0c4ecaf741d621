"""What the benchmarks share with the examples: text that every machine has, and small models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a type checker starts at the root
    from examples.corpus import Corpus, build_corpus
    from examples.small_model import move_within_rounding, small_model, text_model_types
else:
    # Last, so that it hides no module of the same name.
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from corpus import Corpus, build_corpus
    from small_model import move_within_rounding, small_model, text_model_types

__all__ = ["Corpus", "build_corpus", "move_within_rounding", "small_model", "text_model_types"]
