"""The longest rows that docs/memory.md lists are those that its options give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from liger_patch.__main__ import main

MEMORY = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
SECTION = MEMORY.split("## The longest row")[1]
GIB, CARDS = 2**30, ("24", "48", "80", "141")
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "architectures": ["LlamaForCausalLM"],
}


def written(name: str) -> list[int]:
    """Return the numbers of a line."""
    (line,) = (each for each in SECTION.splitlines() if each.startswith(f"| {name} |"))
    return [int(each.replace(",", "")) for each in line.strip("| ").split("|")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--checkpoint-offload",
        "--checkpoint-offload --host-gib 100",
    ],
)
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
