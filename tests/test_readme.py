"""The documents' tables are what the registry and the measured results say.

UPDATE_README=1 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import check_section
from support_cases import trainers_table

from benchmarks.distributed_tables import (
    distributed_heads_table,
    distributed_table,
    drift_table,
)
from benchmarks.head_tables import (
    heads_table,
    idle_table,
    layer_kernels_table,
    log_probs_table,
    readme_table,
)
from benchmarks.report import RESULTS, read
from benchmarks.step_tables import (
    convergence_table,
    long_row_check_table,
    longest_rows_table,
    lora_steps_table,
    lora_summary,
    sft_steps_table,
    steps_table,
)
from liger_patch.layers.replace import LAYERS
from liger_patch.registry import ARCHITECTURES, Architecture

DOCS = Path(__file__).parents[1] / "docs"
FAMILIES = ("Llama", "Gemma", "Qwen", "Others")


def models(rows: tuple[Architecture, ...]) -> str:
    """One line a family; rows without a layer on kernels are marked."""
    lines = []
    for family in FAMILIES:
        members = [row for row in rows if row.family == family]
        named = (f"`{row.model_type}`{'' if row.kinds else ' (loss alone)'}" for row in members)
        lines.append(f"- **{family}**, {len(members)}: {', '.join(named)}")
    return "\n".join(lines)


def of_results(table: Callable[..., str], *names: str) -> Callable[[], str]:
    return lambda: table(*(read(RESULTS / name) for name in names))


README, PAGE = Path(__file__).parents[1] / "README.md", DOCS / "results.md"
SECTIONS: dict[str, tuple[Path, Callable[[], str]]] = {
    "lora_summary": (README, of_results(lora_summary, "lora_step.json")),
    "models": (DOCS / "models.md", lambda: models(ARCHITECTURES)),
    "support_trainers": (DOCS / "trl.md", trainers_table),
} | {
    name: (PAGE, of_results(table, f"{file}.json"))
    for name, table, file in (
        ("steps", steps_table, "training_step"),
        ("steps_packed", steps_table, "training_step_packed"),
        ("compiled", steps_table, "training_step_compiled_h200"),
        ("lora_steps", lora_steps_table, "lora_step"),
        ("moe_steps", lora_steps_table, "moe_step"),
        ("longest_rows", longest_rows_table, "longest_row"),
        ("long_row_check", long_row_check_table, "long_row_check"),
        ("benchmark", readme_table, "linear_cross_entropy"),
        ("idle", idle_table, "linear_cross_entropy"),
        ("heads", heads_table, "kinds_of_heads"),
        ("log_probs", log_probs_table, "log_probs"),
        ("sft_steps", sft_steps_table, "sft_step"),
        ("layer_kernels", layer_kernels_table, "layer_kernels"),
        ("distributed_steps", distributed_table, "distributed_step"),
        ("distributed_heads", distributed_heads_table, "distributed_heads"),
        ("distributed_convergence", drift_table, "distributed_convergence"),
        ("convergence", convergence_table, "convergence"),
        ("lora_convergence", convergence_table, "convergence_adapters"),
    )
}


@pytest.mark.parametrize("name", SECTIONS)
def test_documents_have_what_is_generated_for_them(name: str) -> None:
    document, section = SECTIONS[name]
    check_section(document, name, section())


def test_every_section_of_the_documents_is_generated() -> None:
    of_others = {"kinds", "engines", "estimated_peaks"}  # test_head_kinds, _engines, _calibration
    found = {
        name
        for document in (README, *DOCS.glob("*.md"))
        for name in re.findall(r"<!-- /(\w+) -->", document.read_text(encoding="utf-8"))
    }
    assert found == SECTIONS.keys() | of_others


def test_the_list_names_every_row_in_its_family() -> None:
    lines = models(ARCHITECTURES).splitlines()
    assert len(lines) == len(FAMILIES)
    for row in ARCHITECTURES:
        line = lines[FAMILIES.index(row.family)]
        assert (f"`{row.model_type}`" in line, f"`{row.model_type}` (loss" in line) == (
            True,
            not row.kinds,
        )
    assert sum(line.count("`") for line in lines) == 2 * len(ARCHITECTURES)


@pytest.mark.parametrize(
    ("document", "begins"),
    [("options", "| `layers` |"), ("troubleshooting", "| `layers must be"), ("models", "| `")],
)
def test_documents_name_all_layers(document: str, begins: str) -> None:
    """Those of ``layers`` begin the lines of its first table."""
    text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
    lines = re.search(rf"(^{re.escape(begins)}.*\n)+", text, re.M)
    assert lines is not None
    names = re.findall(r"^\| `(\w+)`" if document == "models" else r'"(\w+)"', lines[0], re.M)
    assert names == list(LAYERS)
