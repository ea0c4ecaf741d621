"""The documents' tables are what the registry and the measured results say.

UPDATE_README=1 writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from report import (
    RESULTS,
    convergence_table,
    heads_table,
    layer_kernels_table,
    log_probs_table,
    readme_table,
    sft_steps_table,
    steps_table,
)
from sections import check_section

from liger_patch.registry import ARCHITECTURES, Architecture

DOCS = Path(__file__).parents[1] / "docs"
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


def of_results(table: Callable[[dict], str], name: str) -> Callable[[], str]:
    return lambda: table(json.loads((RESULTS / name).read_text(encoding="utf-8")))


README = Path(__file__).parents[1] / "README.md"
HEADS, TRL, LAYERS = DOCS / "heads.md", DOCS / "trl.md", DOCS / "layers.md"
SECTIONS: dict[str, tuple[Path, Callable[[], str]]] = {
    "architectures": (README, lambda: table(ARCHITECTURES)),
    "benchmark": (README, of_results(readme_table, "linear_cross_entropy.json")),
    "steps": (README, of_results(steps_table, "training_step.json")),
    "heads": (HEADS, of_results(heads_table, "kinds_of_heads.json")),
    "qlora": (HEADS, of_results(steps_table, "qlora_step.json")),
    "log_probs": (TRL, of_results(log_probs_table, "log_probs.json")),
    "sft_steps": (TRL, of_results(sft_steps_table, "sft_step.json")),
    "layer_kernels": (LAYERS, of_results(layer_kernels_table, "layer_kernels.json")),
    "compiled": (LAYERS, of_results(steps_table, "training_step_compiled.json")),
    "convergence": (LAYERS, of_results(convergence_table, "convergence.json")),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_documents_have_what_is_generated_for_them(name: str) -> None:
    document, section = SECTIONS[name]
    check_section(document, name, section())


def test_every_section_of_the_documents_is_generated() -> None:
    of_heads = {"kinds"}  # test_head_kinds
    found = {
        name
        for document in (README, *DOCS.glob("*.md"))
        for name in re.findall(r"<!-- /(\w+) -->", document.read_text(encoding="utf-8"))
    }
    assert found == SECTIONS.keys() | of_heads


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_the_table_names_every_row_in_its_family(row: Architecture) -> None:
    (line,) = [x for x in table(ARCHITECTURES).splitlines() if x.startswith(f"| {row.family} |")]
    assert f"`{row.model_type}`" in line
    assert f"`{row.model_type}`" not in table(tuple(r for r in ARCHITECTURES if r is not row))
