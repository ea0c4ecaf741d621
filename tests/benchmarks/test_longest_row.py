"""The benchmark of the longest rows: the search of a contender, and its process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.longest_row import summary
from benchmarks.lora_step import CHECKPOINTED
from benchmarks.models import Model
from benchmarks.row_search import Search, rows
from benchmarks.sft_step import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TINY = Model("tiny", LlamaConfig(**SIZES, **HEADS), sequences=1)
LORA, _ = CHECKPOINTED
SEARCH = Search("eager", "tiny", "", LORA, (1.0, 2.0), 8, 96, (16,), 1, "cpu")


@pytest.fixture
def search_of(tmp_path: Path) -> Callable[..., Search]:
    """Save the tiny model, and return what asks for it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY.config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return lambda contender: replace(SEARCH, contender=contender, folder=str(tmp_path))


@pytest.mark.parametrize("contender", ["eager", "liger_patch"])
def test_a_contender_searches_up_to_the_most(search_of: Callable[..., Search], contender: str):
    """On the CPU every row fits."""
    found = list(rows(search_of(contender)))
    assert found[0]["timed"] == 16
    assert found[0]["ms"] > 0
    steps = found[1:]
    assert [row["tokens"] for row in steps if row["gib"] == 1.0] == [8, 16, 32, 64, 96]
    assert not [row for row in steps if row["gib"] == 2.0]  # known
    _, small, large = summary(search_of(contender), found, "does not run: exit status 0: ", 8)
    assert (small["tokens"], large["tokens"]) == (96, 96)
    assert small["at_least"]
    assert large["at_least"]
    assert not any("failure" in row for row in steps)
