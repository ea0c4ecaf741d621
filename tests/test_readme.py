"""The documents' tables are what the registry and the measured results say.

UPDATE_README=1 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from documents import check_section
from support_cases import engines_table, families_table, trainers_table

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
    other_gpus_table,
    quack_table,
    readme_table,
)
from benchmarks.report import RESULTS, read
from benchmarks.step_tables import (
    convergence_table,
    headline,
    long_row_check_table,
    longest_rows_table,
    longest_summary,
    lora_steps_table,
    lora_summary,
    sft_steps_table,
    steps_table,
    summary_table,
)
from liger_patch.layers.replace import LAYERS
from liger_patch.registry import ARCHITECTURES, Architecture

DOCS = Path(__file__).parents[1] / "docs"
FAMILIES = ("Llama", "Gemma", "Qwen", "Others")


def families(rows: tuple[Architecture, ...]) -> str:
    """One line a family: how many rows it has, and their `config.model_type`; but of the others."""
    lines = [["Family", "Tested", "`config.model_type`"], ["---"] * 3]
    for family in FAMILIES:
        members = [f"`{row.model_type}`" for row in rows if row.family == family]
        named = "all in [docs/models.md](docs/models.md)" if family == "Others" else None
        lines.append([family, str(len(members)), named or ", ".join(members)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models(rows: tuple[Architecture, ...]) -> str:
    """One line a row, family by family."""
    lines = [["`config.model_type`", "class", "loss", "layers"], ["---"] * 4]
    for row in sorted(rows, key=lambda row: FAMILIES.index(row.family)):
        layers = "yes" if row.kinds else ""
        lines.append([f"`{row.model_type}`", f"`{row.class_name}`", "yes", layers])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_results(table: Callable[..., str], *names: str) -> Callable[[], str]:
    return lambda: table(*(read(RESULTS / name) for name in names))


README = Path(__file__).parents[1] / "README.md"
INDEX = DOCS / "index.md"
PERFORMANCE, DISTRIBUTED = DOCS / "performance.md", DOCS / "distributed.md"
STEPS, COMPILED = "training_step.json", "training_step_compiled.json"
SECTIONS: dict[str, tuple[Path, Callable[[], str]]] = {
    "headline": (README, of_results(headline, STEPS)),
    "architectures": (README, lambda: families(ARCHITECTURES)),
    "models": (DOCS / "models.md", lambda: models(ARCHITECTURES)),
    "summary": (README, of_results(summary_table, STEPS, COMPILED)),
    "steps": (PERFORMANCE, of_results(steps_table, STEPS)),
    "steps_packed": (PERFORMANCE, of_results(steps_table, "training_step_packed.json")),
    "compiled": (PERFORMANCE, of_results(steps_table, "training_step_compiled_h200.json")),
    "benchmark": (PERFORMANCE, of_results(readme_table, "linear_cross_entropy.json")),
    "idle": (PERFORMANCE, of_results(idle_table, "linear_cross_entropy.json")),
    "quack": (PERFORMANCE, of_results(quack_table, "linear_cross_entropy.json")),
    "other_gpus": (PERFORMANCE, of_results(other_gpus_table, "linear_cross_entropy.json")),
    "other_gpus_h100": (
        PERFORMANCE,
        of_results(partial(other_gpus_table, key="other_gpus_h100"), "linear_cross_entropy.json"),
    ),
    "heads": (PERFORMANCE, of_results(heads_table, "kinds_of_heads.json")),
    "qlora": (PERFORMANCE, of_results(steps_table, "qlora_step.json")),
    "lora_summary": (README, of_results(lora_summary, "lora_step.json")),
    "lora_steps": (DOCS / "lora.md", of_results(lora_steps_table, "lora_step.json")),
    "log_probs": (PERFORMANCE, of_results(log_probs_table, "log_probs.json")),
    "sft_steps": (PERFORMANCE, of_results(sft_steps_table, "sft_step.json")),
    "layer_kernels": (PERFORMANCE, of_results(layer_kernels_table, "layer_kernels.json")),
    "distributed_heads": (
        DISTRIBUTED,
        of_results(distributed_heads_table, "distributed_heads.json"),
    ),
    "distributed_steps": (DISTRIBUTED, of_results(distributed_table, "distributed_step.json")),
    "distributed_convergence": (
        DISTRIBUTED,
        of_results(drift_table, "distributed_convergence.json"),
    ),
    "lora_convergence": (
        DOCS / "lora.md",
        of_results(convergence_table, "convergence_adapters.json"),
    ),
    "longest_summary": (README, of_results(longest_summary, "longest_row.json")),
    "longest_rows": (DOCS / "memory.md", of_results(longest_rows_table, "longest_row.json")),
    "long_row_check": (
        DOCS / "memory.md",
        of_results(long_row_check_table, "long_row_check.json"),
    ),
    "support_trainers": (INDEX, trainers_table),
    "support_engines": (INDEX, engines_table),
    "support_families": (INDEX, families_table),
    "convergence": (PERFORMANCE, of_results(convergence_table, "convergence.json")),
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


def test_the_tables_name_every_row_in_its_family() -> None:
    by_family = families(ARCHITECTURES).splitlines()
    by_row = models(ARCHITECTURES).splitlines()
    assert len(by_row) == 2 + len(ARCHITECTURES)
    for row in ARCHITECTURES:
        (line,) = [x for x in by_family if x.startswith(f"| {row.family} |")]
        assert row.family == "Others" or f"`{row.model_type}`" in line
        (line,) = [x for x in by_row if x.startswith(f"| `{row.model_type}` |")]
        assert f"`{row.class_name}`" in line
        assert line.count("yes") == 1 + bool(row.kinds)
    assert sum(int(line.split("|")[2]) for line in by_family[2:]) == len(ARCHITECTURES)


@pytest.mark.parametrize(
    ("document", "begins"),
    [("options", "| `layers` |"), ("troubleshooting", "| `layers must be"), ("layers", "| `")],
)
def test_documents_name_all_layers(document: str, begins: str) -> None:
    """Those of ``layers`` begin the lines of its first table."""
    text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
    lines = re.search(rf"(^{re.escape(begins)}.*\n)+", text, re.M)
    assert lines is not None
    names = re.findall(r"^\| `(\w+)`" if document == "layers" else r'"(\w+)"', lines[0], re.M)
    assert tuple(names) == LAYERS
