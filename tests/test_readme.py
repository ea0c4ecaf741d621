"""The README's tables are what the registry and the measured results say.

UPDATE_README=1 writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from report import readme_table, steps_table

from liger_patch.registry import ARCHITECTURES, Architecture

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "benchmarks" / "results" / "linear_cross_entropy.json"
STEPS = RESULTS.with_name("training_step.json")
FAMILIES = ("Llama", "Gemma", "Qwen", "Others")
KINDS = {"ForCausalLM": "Text", "ForConditionalGeneration": "Images, audio and text"}


def kind(row: Architecture) -> str:
    return next(column for ending, column in KINDS.items() if row.class_name.endswith(ending))


def table(rows: tuple[Architecture, ...]) -> str:
    """One line a family: `config.model_type` of its text models and of its models of more."""
    lines = [["Family", *KINDS.values()], ["---"] * (1 + len(KINDS))]
    for family in FAMILIES:
        members = [row for row in rows if row.family == family]
        cells = (
            ", ".join(f"`{row.model_type}`" for row in members if kind(row) == column)
            for column in KINDS.values()
        )
        lines.append([family, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured() -> str:
    return readme_table(json.loads(RESULTS.read_text(encoding="utf-8")))


def steps() -> str:
    return steps_table(json.loads(STEPS.read_text(encoding="utf-8")))


SECTIONS: dict[str, Callable[[], str]] = {
    "architectures": lambda: table(ARCHITECTURES),
    "benchmark": measured,
    "steps": steps,
}


def with_section(text: str, name: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    assert start in text, f"README.md has no line {start}"
    assert end in text, f"README.md has no line {end}"
    before, rest = text.split(start, 1)
    _, after = rest.split(end, 1)
    return f"{before}{start}\n{SECTIONS[name]()}\n{end}{after}"


@pytest.mark.parametrize("name", SECTIONS)
def test_readme_has_what_is_generated_for_it(name: str) -> None:
    text = README.read_text(encoding="utf-8")
    expected = with_section(text, name)
    if os.environ.get("UPDATE_README") == "1":
        README.write_text(expected, encoding="utf-8")
        return
    assert text == expected, (
        f"README.md, section {name}, must be (UPDATE_README=1 writes it):\n\n{SECTIONS[name]()}"
    )


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_the_table_names_every_row_in_its_family(row: Architecture) -> None:
    (line,) = [x for x in table(ARCHITECTURES).splitlines() if x.startswith(f"| {row.family} |")]
    assert f"`{row.model_type}`" in line
    assert f"`{row.model_type}`" not in table(tuple(r for r in ARCHITECTURES if r is not row))
