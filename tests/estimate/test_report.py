"""What a reader is told beside estimates; the command's tests see the table and JSON."""

from __future__ import annotations

from liger_patch.estimate.estimate import Estimate
from liger_patch.estimate.report import notes


def test_notes_name_the_contenders_without_longest_rows() -> None:
    found = [Estimate("eager", {}, {16: 1}), Estimate("liger_patch", {})]
    (note,) = notes("Model", True, found)
    assert note.startswith("The longest sequences of liger_patch are not estimated: ")
    assert notes("Model", True, found[:1]) == []
