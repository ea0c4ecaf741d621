"""Format the tables of training steps and longest rows: whole models on one GPU."""

from __future__ import annotations

from .convergence_report import curve_difference, judgement, losses
from .longest_report import (
    attention_note,
    check_cells,
    longest_cells,
    of_all_runs,
    runs_note,
)
from .markdown import Row, cells_of, document, model_of, time_and_memory, versions_of
from .names import EAGER, LOWER_BOUND, OURS, UNSLOTH, by_default

RATIO = f"{OURS} / {UNSLOTH}, time and memory"


def steps_table(report: dict) -> str:
    report = by_default(report)
    note = (
        ": forward and backward, random weights, 40 % of the labels ignored, no checkpointing; "
        "memory over the weights, gradients included."
    )
    return document(report, cells_of("training step, ms / GiB", report["steps"], model_of), note)


def sft_steps_table(report: dict) -> str:
    report = by_default(report)
    note = (
        ": loss, metrics and backward pass, random weights, all of them trained, 40 % of the "
        "labels ignored, no checkpointing; memory over the weights."
    )
    return document(
        report, cells_of("step of SFTTrainer, ms / GiB", report["sft_steps"], model_of), note
    )


def rl_steps_table(report: dict) -> str:
    note = (
        ": loss, metrics and backward pass of TRL's trainer, reference included, no generation; "
        "adapters of rank 16 on all linear layers but the head, log-normal lengths around these "
        "numbers of tokens; memory over the weights. padded: our flag, with the padding left in."
    )
    rows, heading = report["rl_steps"], "update, ms / GiB"
    if any("tokens" in row for row in rows):
        heading += " / tokens"
        note += " prompts repeated: without the padding, but with a prompt for each completion."
    trls = sorted({row["trl"] for row in rows if "trl" in row})
    if trls:
        note += (
            f" Unsloth: a process of its own, with TRL {' and '.join(trls)}, adapters in float32 "
            "under autocast, its own checkpointing."
        )
    return document(report, cells_of(heading, rows, model_of, _with_tokens), note)


def _with_tokens(row: Row) -> str:
    cell = time_and_memory(row)
    return f"{cell} / {row['tokens']:,}" if "tokens" in row and "ms" in row else cell


def lora_steps_table(report: dict) -> str:
    rows = report["lora_steps"]
    cells, ratio_of = cells_of("training step, ms / GiB", rows, model_of), ratios(rows)
    cells = [[*line, ratio_of.get(line[0], "")] for line in cells]
    cells[0][-1] = RATIO
    note = (
        ": forward and backward under autocast, random weights, 40 % of the labels ignored, "
        "adapters of rank 16 in float32 on all linear layers but the head; one process a "
        "contender, memory with the weights. The longest first step, kernels compiled: "
        f"{first_steps(rows)}."
    )
    return document(report, cells, note)


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
        "host memory; rows without checkpointing have none."
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


def long_row_check_table(report: dict) -> str:
    note = (
        ": one row under autocast, random weights, QLoRA of rank 16, offloaded checkpoints, "
        "attention within blocks of 8192 tokens. Errors by norm, against the blocks one by one in "
        "float32; eager computes the same blocks. A gradient may have twice eager's error."
    )
    return document(report, check_cells(report["long_row_check"]), note)


def soak_table(report: dict) -> str:
    cells = [["", "last held-out loss", "training loss, from eager's", "growth of memory, MiB"]]
    eager: Row = {}
    for row in report["soaks"]:
        eager = row if row["contender"] == EAGER else eager
        held_out, apart = f"{row['held_out'][-1]:.4f}", f"{curve_difference(row, eager):.4f}"
        name = f"{row['model']}, {row['steps']:,} steps: {row['contender']}"
        cells.append([name, held_out, apart, f"{row['growth_mib']:.2f}"])
    note = ": adapters on a small model, in bf16. "
    if any(row["model"] == "Trainer" for row in report["soaks"]):
        note += (
            "Trainer: two batches a step, two adapters in turns, evaluation with metrics, "
            "checkpoints, a new model that resumes in the middle. "
        )
    note += (
        "rounded: first weights moved by half an eps of bfloat16 at most. Losses are means of 10 "
        "steps; growth is of the memory that is allocated behind a step, from step 100 on."
    )
    return document(report, cells, note)


def convergence_table(report: dict) -> str:
    report = by_default(report)
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


def terminal_lora_table(rows: list[dict]) -> str:
    """Format the rows of one model: time, also over Unsloth's, peak memory, first step, loss."""
    columns = f"{'ms':>10s}{'/ Unsloth':>11s}{'peak GiB':>10s}{'first s':>9s}"
    columns += f"{'loss':>10s}{'gradient':>12s}"
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        of_name = [row for row in rows if row["model"] == name]
        peer = _ms(of_name, UNSLOTH)
        lines += [name, f"  {'':22s}{columns}"]
        lines += [f"  {row['contender']:22s}{_line(row, peer)}".rstrip() for row in of_name]
    return "\n".join(lines)


def ratios(rows: list[dict]) -> dict[str, str]:
    """Return our time and memory over Unsloth's by row, where both are right."""
    found = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        timed = {
            row["contender"]: row
            for row in rows
            if row["model"] == name and "ms" in row and not row.get("wrong")
        }
        if OURS in timed and UNSLOTH in timed:
            ours, peer = timed[OURS], timed[UNSLOTH]
            time, memory = (ours[field] / peer[field] for field in ("ms", "peak_mib"))
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


def _line(row: dict, peer: float | None) -> str:
    if "failure" in row:
        return f"  {row['failure']}"
    ratio = f"{row['ms'] / peer:.2f}" if peer else ""
    line = f"{row['ms']:10.1f}{ratio:>11s}"
    if "loss" not in row:
        return line
    line += f"{row['peak_mib'] / 1024:10.1f}{row['first_step_s']:9.1f}{row['loss']:10.4f}"
    return line + f"{row['gradient_norm']:12.4g}" + ("  wrong" if row.get("wrong") else "")


def _ms(rows: list[dict], contender: str) -> float | None:
    return next((row["ms"] for row in rows if row["contender"] == contender and "ms" in row), None)
