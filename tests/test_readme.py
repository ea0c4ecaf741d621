"""The documents' tables are what the registry and the measured results say.

UPDATE_README=1 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import check_section

from benchmarks.markdown import versions_of
from benchmarks.names import LOWER_BOUND
from benchmarks.quoted_tables import (
    convergence_table,
    distillation_table,
    distributed_table,
    longest_rows_table,
    lora_steps_table,
    lora_summary,
    readme_table,
    rl_steps_table,
    soak_table,
    steps_table,
)
from benchmarks.report import RESULTS, read
from liger_patch.layers.replace import LAYERS
from liger_patch.registry import ARCHITECTURES, Architecture

DOCS = Path(__file__).parents[1] / "docs"
FAMILIES = ("Llama", "Gemma", "Qwen", "Others")


def models(rows: tuple[Architecture, ...]) -> str:
    """One line a family; rows without a layer on kernels are marked."""
    lines = []
    for family in FAMILIES:
        members = [row for row in rows if row.family == family]
        named = (f"`{row.model_type}`{'' if row.kinds else '¹'}" for row in members)
        lines.append(f"- **{family}**, {len(members)}: {', '.join(named)}")
    return "\n".join(lines)


def of_results(table: Callable[[dict], str], file: str, left_out: str = "") -> Callable[[], str]:
    """The table of a report's rows, but for those that a pattern finds by their fields."""

    def is_quoted(row: dict) -> bool:
        fields = "; ".join(f"{name} {value}" for name, value in row.items())
        return not left_out or re.search(left_out, fields) is None

    def quoted() -> str:
        report = read(RESULTS / f"{file}.json")
        lists = {key: value for key, value in report.items() if isinstance(value, list)}
        return table(report | {key: [*filter(is_quoted, lists[key])] for key in lists})

    return quoted


def versions() -> str:
    """Of all reports that the page quotes."""
    reports = (read(RESULTS / f"{file}.json") for _, file, _ in QUOTED.values())
    return f"Versions: {versions_of(*reports)}."


WITHOUT_LAYERS = "contender liger_patch, layers=False;"
# section of the page -> table, file, and which rows are left to the file
QUOTED: dict[str, tuple[Callable[[dict], str], str, str]] = {
    "steps": (steps_table, "training_step", ""),
    "steps_packed": (
        steps_table,
        "training_step_packed",
        f"padded|{LOWER_BOUND}|loss only|with masks|{WITHOUT_LAYERS}",
    ),
    "lora_steps": (
        lora_steps_table,
        "lora_step",
        f"of 18 layers.*(QLoRA|LoRA .)|2048, QLoRA;|{LOWER_BOUND}",
    ),
    "fp8_steps": (lora_steps_table, "lora_step_fp8", LOWER_BOUND),
    "moe_steps": (lora_steps_table, "moe_step", ""),
    "rl_steps": (rl_steps_table, "rl_step", ""),
    "grpo_steps": (rl_steps_table, "rl_step_grpo", "generation"),
    "grpo_unsloth_steps": (rl_steps_table, "rl_step_unsloth", "generation|contender TRL"),
    "distillation": (distillation_table, "distillation", "Qwen3-0.6B"),
    "longest_rows": (longest_rows_table, "longest_row", "timed |gib (80|139)"),
    "benchmark": (
        readme_table,
        "linear_cross_entropy",
        "MiB|unfiltered|peaked|Zipf|Qwen3.5|TRL|tokens 65536|Gemma-3-270M",
    ),
    "distributed_steps": (distributed_table, "distributed_step", ""),
    "convergence": (convergence_table, "convergence", WITHOUT_LAYERS),
    "soaks": (soak_table, "soak", ""),
    "soak_trainer": (soak_table, "soak_trainer", ""),
}
README, PAGE = Path(__file__).parents[1] / "README.md", DOCS / "results.md"
SECTIONS: dict[str, tuple[Path, Callable[[], str]]] = {
    "lora_summary": (README, of_results(lora_summary, "lora_step")),
    "models": (DOCS / "models.md", lambda: models(ARCHITECTURES)),
    "versions": (PAGE, versions),
} | {name: (PAGE, of_results(*quoted)) for name, quoted in QUOTED.items()}


@pytest.mark.parametrize("name", SECTIONS)
def test_documents_have_what_is_generated_for_them(name: str) -> None:
    document, section = SECTIONS[name]
    check_section(document, name, section())


def test_every_section_of_the_documents_is_generated() -> None:
    # of test_head_kinds, test_distributed and test_calibration
    of_others = {"kinds", "engines", "estimated_peaks"}
    found = {
        name
        for document in (README, *DOCS.glob("*.md"))
        for name in re.findall(r"<!-- /(\w+) -->", document.read_text(encoding="utf-8"))
    }
    assert found == SECTIONS.keys() | of_others


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
