"""The longest rows that docs/memory.md lists are those that its options give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from liger_patch.__main__ import main

MEMORY = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
def test_the_table_is_that_of_its_options(
    offloaded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = MEMORY.split("## The longest row")[1]
    options = section.split("`")[1].split()
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    }
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
    LlamaConfig(
        vocab_size=128256, architectures=["LlamaForCausalLM"], **shape, **heads
    ).save_pretrained(tmp_path)
    name = "liger_patch, offloaded checkpoints" if offloaded else "liger_patch"
    (line,) = (each for each in section.splitlines() if each.startswith(f"| {name} |"))
    written = [int(each.replace(",", "")) for each in line.strip("| ").split("|")[1:]]
    more = ["--checkpoint-offload"] if offloaded else []
    main(["estimate", str(tmp_path), *options, *more, "--json"])
    ours = json.loads(capsys.readouterr().out)["contenders"][-1]
    (longest,) = (each for each in ours.values() if isinstance(each, dict) and "141" in each)
    assert written == [longest[gib] // 1000 * 1000 for gib in ("24", "48", "80", "141")]
