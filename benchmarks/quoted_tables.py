"""Format the tables that README and docs quote."""

from __future__ import annotations

import re

from .attention_blocks import BLOCK
from .convergence_report import curve_difference, judgement, losses
from .markdown import (
    TIME_AND_MEMORY,
    Row,
    case_of,
    cells_of,
    document,
    head_and_tokens,
    model_of,
    time_and_memory,
    versions_of,
)
from .names import EAGER, FP8, KERNELS_OF_OTHERS, LOWER_BOUND, OURS, PYTORCH, QUACK, UNSLOTH

PEERS = {  # of a head, which a report may lack -> what they are
    PYTORCH: "PyTorch's own linear_cross_entropy (needs torch 2.13)",
    QUACK: "QuACK",
    UNSLOTH: "Unsloth's fused loss",
}
OTHERS_SAID = f" With {KERNELS_OF_OTHERS}: the kernels that GPUs other than Hopper run."


def readme_table(report: dict) -> str:
    note = (
        ": memory over the inputs. The matmul-only bound is the matrix products alone, a lower "
        "bound for any exact loss."
    )
    contenders = {row["contender"] for row in report["results"]}
    if absent := [what for name, what in PEERS.items() if name not in contenders]:
        note += f" Not measured: {', '.join(absent)}."
    if any(KERNELS_OF_OTHERS in name for name in contenders):
        note += OTHERS_SAID
    return document(report, cells_of(TIME_AND_MEMORY, report["results"], head_and_tokens), note)


def distillation_table(report: dict) -> str:
    rows = [
        row | {"peak_mib": row["peak_mib"] - row["gradients_mib"]} if "peak_mib" in row else row
        for row in report["distillation"]
    ]
    note = ": memory over inputs and gradients. The matmul-only bound is the four products alone."
    return document(report, cells_of(TIME_AND_MEMORY, rows, case_of), note)


def steps_table(report: dict) -> str:
    return document(report, cells_of("training step, ms / GiB", report["steps"], model_of), ".")


def rl_steps_table(report: dict) -> str:
    rows, heading, note = report["rl_steps"], "update, ms / GiB", "."
    if any("tokens" in row for row in rows):
        heading += " / tokens"
    if trls := sorted({row["trl"] for row in rows if "trl" in row}):
        note += f" Unsloth with TRL {' and '.join(trls)}."
    return document(report, cells_of(heading, rows, model_of, _with_tokens), note)


def _with_tokens(row: Row) -> str:
    cell = time_and_memory(row)
    return f"{cell} / {row['tokens']:,}" if "tokens" in row and "ms" in row else cell


def lora_steps_table(report: dict) -> str:
    rows = report["lora_steps"]
    ours = FP8 if any(row["contender"] == FP8 for row in rows) else OURS
    cells, ratio_of = cells_of("training step, ms / GiB", rows, model_of), ratios(rows, ours)
    cells = [[*line, ratio_of.get(line[0], "")] for line in cells]
    cells[0][-1] = f"{ours} / {UNSLOTH}, time and memory"
    return document(
        report, cells, f". The longest first step, kernels compiled: {first_steps(rows)}."
    )


def lora_summary(report: dict) -> str:
    """Format the plainest and the most frugal line of each model in which every contender ended,
    without the bound.
    """
    measured = [row for row in report["lora_steps"] if row["contender"] != LOWER_BOUND]
    failed = {row["model"] for row in measured if "failure" in row}
    lines = [row["model"] for row in measured if row["model"] not in failed]
    checkpointed = [line for line in lines if line.endswith(" + checkpointing")]
    frugal = {line.rpartition(", ")[0]: line for line in checkpointed}  # QLoRA is the later one
    names = {line for line in lines if line.endswith(", LoRA")} | set(frugal.values())
    rows = [row for row in measured if row["model"] in names]
    note = (
        ": forward and backward in bf16 under autocast, random weights, 40 % of the labels "
        "ignored, adapters of rank 16 in float32 on all linear layers but the head; medians, peak "
        f"memory with the weights. With {versions_of(report)}. Offloaded: the checkpoints wait in "
        "host memory; rows without checkpointing have none. Other empty cells: not in that run."
    )
    return document(report, cells_of("LoRA step, ms / GiB", rows, model_of), note)


def longest_rows_table(report: dict) -> str:
    rows = report["longest_rows"]
    note = (
        ": forward and backward of one row under autocast, random weights, checkpointing, adapters "
        "of rank 16 in float32; one process a contender, memory limited by PyTorch's allocator, "
        f"rows in steps of 8192 tokens or 2 %. {attention_note(rows)}{runs_note(rows)}"
    )
    return document(of_all_runs(report), longest_cells(rows), note)


def soak_table(report: dict) -> str:
    cells = [["", "last held-out loss", "training loss, from eager's", "growth of memory, MiB"]]
    eager: Row = {}
    for row in report["soaks"]:
        eager = row if row["contender"] == EAGER else eager
        held_out, apart = f"{row['held_out'][-1]:.4f}", f"{curve_difference(row, eager):.4f}"
        name = f"{row['model']}, {row['steps']:,} steps: {row['contender']}"
        cells.append([name, held_out, apart, f"{row['growth_mib']:.2f}"])
    return document(report, cells, ".")


def convergence_table(report: dict) -> str:
    tokens = report["settings"]["batch_size"] * report["settings"]["length"]
    has_adapters = any(" + " in row["model"] for row in report["convergence"])
    weights = "a frozen base, with adapters in float32" if has_adapters else "float32 weights"
    note = (
        f": autocast over {weights}, {tokens} tokens of Python's standard library a step, "
        "from random weights; rounded is seed 0 with each first weight moved by half an eps of "
        "bfloat16 at most. Held-out losses are those of an unpatched model, without autocast. "
        f"{judgement(report['convergence'])}"
    )
    return document(report, losses(report), note)


def ratios(rows: list[dict], ours: str) -> dict[str, str]:
    """Return time and memory of one of ours over Unsloth's by row, where both are right."""
    found = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        timed = {
            row["contender"]: row
            for row in rows
            if row["model"] == name and "ms" in row and not row.get("wrong")
        }
        if ours in timed and UNSLOTH in timed:
            own, peer = timed[ours], timed[UNSLOTH]
            time, memory = (own[field] / peer[field] for field in ("ms", "peak_mib"))
            found[name] = f"{time:.2f} / {memory:.2f}"
    return found


def first_steps(rows: list[dict]) -> str:
    """Say how long the longest first step of each contender took, kernels compiled."""
    longest: dict[str, float] = {}
    for row in rows:
        if "first_step_s" in row:
            seconds = max(row["first_step_s"], longest.get(row["contender"], 0.0))
            longest[row["contender"]] = seconds
    return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in longest.items())


def longest_cells(rows: list[dict]) -> list[list[str]]:
    """Return lines of cells, a column a contender; the first line is the heading."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    is_timed = any("timed" in row for row in rows)
    what = "longest row, tokens; time per token, µs" if is_timed else "longest row, tokens"
    cells = [[what, *contenders]]
    found = {(_line(row), row["contender"]): _cell(row, rows) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    ordered = sorted(rows, key=lambda row: (models.index(row["model"]), row.get("gib", 0)))
    for line in dict.fromkeys(map(_line, ordered)):
        cells.append([line, *(found.get((line, each), "") for each in contenders)])
    return cells


def attention_note(rows: list[dict]) -> str:
    """Say which rows attended to all tokens before, of each run that differs."""
    runs: dict[int, set[int]] = {}
    for row in rows:
        runs.setdefault(row["whole_attention"], set()).add(row.get("run", 1))
    whole, *others = sorted(runs, key=lambda tokens: min(runs[tokens]))
    differing = "".join(f"; in some runs, those of more than {tokens:,}" for tokens in others)
    return f"Rows of more than {whole:,} tokens attend within blocks of {BLOCK}{differing}."


def runs_note(rows: list[dict]) -> str:
    """Say how to read times where the report is of several runs; their rows have a ``run``."""
    if not any("run" in row and "timed" in row for row in rows):
        return ""
    return " Times are compared within a run only; a length does not depend on the run."


def of_all_runs(report: dict) -> dict:
    """Return the report with the first and the last day of its runs."""
    days = sorted(re.findall(r"\d{4}-\d\d-\d\d", report["date"]))
    return report | {"date": " to ".join(dict.fromkeys((days[0], days[-1])))}


def _line(row: dict) -> str:
    if "timed" in row:
        run = f", run {row['run']}" if "run" in row else ""  # times of two runs have no line
        return f"{row['model']}, {row['timed']:,} tokens{run}"
    return f"{row['model']}, {row['gib']:g} GiB"


def _cell(row: dict, rows: list[dict]) -> str:
    if "failure" in row:
        return row["failure"]
    if "timed" not in row:
        ends = f" ({row['ends_with']})" if "ends_with" in row else ""  # not for want of memory
        if not row["tokens"]:
            return f"< {BLOCK:,}"  # the shortest row that is tried
        return f"{'>= ' if row.get('at_least') else ''}{row['tokens']:,}{ends}"
    micros = 1000 * row["ms"] / row["timed"]
    eager = next((e["ms"] for e in rows if e["contender"] == EAGER and _is_same(e, row)), None)
    return f"{micros:.1f}" + (f" ({row['ms'] / eager:.2f} of eager)" if eager else "")


def _is_same(eager: dict, row: dict) -> bool:
    same = ("model", "timed", "run")
    return "ms" in eager and all(eager.get(field) == row.get(field) for field in same)


def distributed_table(report: dict) -> str:
    rows = report["distributed_steps"]
    differ = list(dict.fromkeys(row["model"] for row in _with_other_collectives(rows)))
    ran = {row["model"] for row in rows if row["contender"] == EAGER and "ms" in row}
    said = "all rows" if ran == {row["model"] for row in rows} else "all rows in which eager ran"
    if differ:
        said += f", except: {'; '.join(differ)}"
    note = (
        ": forward and backward, time of the slowest rank, peak memory of a rank over its shards "
        f"of the weights. The same collectives as eager in {said}."
    )
    cells = cells_of("training step, ms / GiB a GPU", rows, model_of)
    return document(report, cells, note)


def _with_other_collectives(rows: list[Row]) -> list[Row]:
    """Return the rows whose collectives are not those of eager in the same step."""
    measured = [row for row in rows if "collectives" in row]
    eager = {row["model"]: row for row in measured if row["contender"] == EAGER}
    return [
        row
        for row in measured
        if _kinds_and_sizes(row) != _kinds_and_sizes(eager.get(row["model"], row))
    ]


def _kinds_and_sizes(row: Row) -> list[tuple]:
    return sorted((each["kind"], each["mib"], each["calls"]) for each in row["collectives"])
