"""The longest rows that docs/memory.md lists are those that its options give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from liger_patch.__main__ import main

MEMORY = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
SECTION = MEMORY.split("## The longest row")[1]
GIB, CARDS = 2**30, ("16", "24", "48", "80", "141")
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "architectures": ["LlamaForCausalLM"],
}
QWEN: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}


def written(name: str) -> list[int]:
    """Return the numbers of a line."""
    (line,) = (each for each in SECTION.splitlines() if each.startswith(f"| {name} |"))
    return [int(each.replace(",", "")) for each in line.strip("| ").split("|")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--checkpoint-offload"])
def test_the_table_is_that_of_its_options(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    options = SECTION.split("`")[1].split()
    main(["estimate", str(tmp_path), *options, *more.split(), "--json"])
    ours = json.loads(capsys.readouterr().out)["contenders"][-1]
    name = f"`{more}`" if more else "liger_patch"
    assert written(name) == [ours["longest"][card] // 1000 * 1000 for card in CARDS]
    if more:
        hosts = [round(ours["longest_host"][card] / GIB) for card in CARDS]
        assert written(f"GiB of the host, {name}") == hosts


@pytest.mark.slow
@pytest.mark.parametrize("name", QWEN)
def test_rows_in_16_gib_are_those_of_the_options(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    config = Qwen3Config(**QWEN[name], **heads, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    main(["estimate", str(tmp_path), *SECTION.split("`")[1].split(), "--json"])
    ours = json.loads(capsys.readouterr().out)["contenders"][-1]
    assert f" {ours['longest']['16'] // 1000},000 tokens of {name}" in SECTION
