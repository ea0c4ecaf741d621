"""The check of a long row: it holds for the patched model, and would find what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.markdown import plain_table

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing. is deprecated:FutureWarning",
        "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning",
    ),
]


@pytest.fixture(autouse=True)
def _attention_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", whole)


def test_the_gradients_of_a_row_are_those_of_its_blocks(tmp_path: Path, capsys):
    assert main(["long_row_check", "--device", "cpu", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "long_row_check.json").read_text(encoding="utf-8"))
    rows = report["long_row_check"]
    assert all(row["holds"] for row in rows)
    assert [row["tokens"] for row in rows] == [64, 160, 64, 64, 64, 64, 160, 160, 160]
    errors = [row for row in rows if "error" in row]
    assert all(0 < row["eager_error"] < 0.05 for row in errors)
    assert all(row["error"] > 0 for row in errors)
    assert {row["loss"] > 0 for row in rows if "loss" in row} == {True}
    table = plain_table(rows)
    assert table in capsys.readouterr().out
    assert "160     gradient of the embeddings, 80 to 95 " in table
