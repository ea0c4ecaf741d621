"""The longest rows that docs/memory.md lists are those that its options give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.longest_row import MODELS
from liger_patch.__main__ import main

MEMORY = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
SECTION = MEMORY.split("## The longest row")[1]
GIB, CARDS = 2**30, ("16", "24", "48", "80", "141")
LLAMA = MODELS[0].config


def written(name: str) -> list[int]:
    """Return the numbers of a line."""
    (line,) = (each for each in SECTION.splitlines() if each.startswith(f"| {name} |"))
    return [int(each.replace(",", "")) for each in line.strip("| ").split("|")[1:]]


@pytest.fixture
def ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What is estimated of a config with the options of the section, and more."""

    def estimated(config: Any, *more: str) -> dict[str, Any]:
        config.save_pretrained(tmp_path)
        main(["estimate", str(tmp_path), *SECTION.split("`")[1].split(), *more, "--json"])
        return json.loads(capsys.readouterr().out)["contenders"][-1]

    return estimated


@pytest.mark.slow
def test_the_table_is_that_of_its_options(ours: Callable[..., dict[str, Any]]) -> None:
    more = "--checkpoint-offload"
    for name, found in (("liger_patch", ours(LLAMA)), (f"`{more}`", ours(LLAMA, more))):
        assert written(name) == [found["longest"][card] // 1000 * 1000 for card in CARDS]
    hosts = [round(found["longest_host"][card] / GIB) for card in CARDS]
    assert written(f"GiB of the host, `{more}`") == hosts
