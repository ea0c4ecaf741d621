"""The check of a long row: it holds for the patched model, and would find what is wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import attention_blocks, long_row_check
from benchmarks.__main__ import main
from benchmarks.long_row_check import TINY, Check, Found, compare, run_check
from benchmarks.longest_report import terminal_check_table

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning",
)


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
    table = terminal_check_table(rows)
    assert table in capsys.readouterr().out
    assert "160     gradient of the embeddings, 80 to 95 " in table


def test_options_reach_the_check():
    given = argparse.Namespace(device="cuda", tokens=None, all_blocks=24576)
    given.checkpoint_every, given.host_gib = 2, 150.0
    (run,) = long_row_check.cases(given)["long_row_check"]
    assert run.args == (Check(all_blocks=24576, checkpoint_every=2, host_gib=150.0),)


def test_a_row_that_attends_beyond_its_blocks_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_blocks, "install", lambda *_: None)
    by_name = {(row["tokens"], row["what"]): row["holds"] for row in run_check(TINY)}
    assert not by_name[64, "gradients of the adapters"]
    assert not by_name[160, "gradient of the embeddings, 144 to 159"]
    assert by_name[160, "loss and gradients are finite"]


def test_a_wrong_label_at_the_end_of_a_block_is_found(monkeypatch: pytest.MonkeyPatch):
    """The last token of a block predicts the first of the next."""
    pad = long_row_check.F.pad

    def without_next(labels: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        shifted = pad(labels, *args, **kwargs)
        shifted[:, 15::16] = -100
        return shifted

    monkeypatch.setattr(long_row_check.F, "pad", without_next)
    by_name = {row["what"]: row["holds"] for row in run_check(TINY)}
    assert not by_name["loss"]
    assert not by_name["gradient of the embeddings"]


def test_an_error_may_be_twice_eagers():
    def found(error: float) -> Found:
        value = torch.full((4,), 1 + error)
        return Found(2.0 * (1 + error), {"a": value, "b": value}, [value], [value] * 3)

    truth, eager = found(0.0), found(0.01)
    assert all(row["holds"] for row in compare(TINY, found(0.019), eager, truth))
    assert not any(row["holds"] for row in compare(TINY, found(0.03), eager, truth))
    assert not any(row["holds"] for row in compare(TINY, found(float("nan")), eager, truth))
    other = found(0.01)
    other.adapters["b"] = torch.full((4,), 1.03)
    worst = [row for row in compare(TINY, other, eager, truth) if row["what"].startswith("worst")]
    assert [(row["what"], row["holds"]) for row in worst] == [("worst of these, b", False)]


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({"tokens": 100_000}, "tokens"), ({"tokens": 16384}, "tokens"), ({"all_blocks": 0}, "all_")],
)
def test_rows_are_whole_blocks(sizes: dict[str, int], name: str):
    with pytest.raises(ValueError, match=f"{name}.* must be a multiple of 8192, .* got"):
        Check(**sizes)  # type: ignore[arg-type]
