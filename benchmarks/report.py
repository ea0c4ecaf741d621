"""A benchmark's report in words: the table on the terminal, and those in the README.

python benchmarks/report.py benchmarks/results/*.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from convergence_report import judgement, losses_table

RESULTS = Path(__file__).parent / "results"
FLOOR = "bare products"
FLOOR_OF_STEPS = (
    " The bare products are the matrix products and attentions of eager's step alone, the head's "
    "for supervised tokens only."
)
COPY = "copy"


def terminal_table(rows: list[dict]) -> str:
    """The rows of one case: time, how much of it the bare products need, memory, errors."""
    first = rows[0]
    title = f"{first['case']} ({first['tokens']} tokens)" if "tokens" in first else first["case"]
    columns = f"{'ms':>8s}{'floor/ms':>10s}{'host ms':>9s}{'peak MiB':>10s}{'error of dX, dW':>20s}"
    lines = [title, f"  {'':24s}{columns}"]
    for row in rows:
        errors = ", ".join(f"{error:.3%}" for error in row.get("gradient_errors", ()))
        if "ms" in row:
            said = f"{row['ms']:8.2f}{row['floor_over_time']:10.3f}{row['host_ms']:9.2f}"
            said += f"{row['peak_mib']:10.0f}"
            said += f"{errors:>20s}"
        elif "failure" in row:
            said = f"  {row['failure']}"
        else:
            said = f"  {'wrong gradients':26s}{errors:>20s}"
        lines.append(f"  {row['contender']:24s}{said}".rstrip())
    return "\n".join(lines)


def terminal_steps_table(rows: list[dict]) -> str:
    """The rows of one model: time, memory over the weights, loss and norm of the gradient."""
    columns = f"{'ms':>8s}{'host ms':>9s}{'peak GiB':>10s}{'loss':>10s}{'gradient':>12s}"
    lines = [rows[0]["model"], f"  {'':24s}{columns}"]
    for row in rows:
        said = f"  {row['failure']}" if "failure" in row else ""
        if row["contender"] == FLOOR and "ms" in row:
            said = f"{row['ms']:8.1f}{row['host_ms']:9.1f}"
        if "loss" in row:
            numbers = f"{row['loss']:10.4f}{row['gradient_norm']:12.4g}"
            if "ms" in row:
                said = (
                    f"{row['ms']:8.1f}{row['host_ms']:9.1f}{row['peak_mib'] / 1024:10.1f}{numbers}"
                )
            elif "wrong" in row:
                said = f"  {'wrong':25s}{numbers}"
        lines.append(f"  {row['contender']:24s}{said}")
    return "\n".join(lines)


def terminal_layer_kernels_table(rows: list[dict]) -> str:
    """The rows of one case, forward then backward: time, bandwidth, its share of a copy's, errors.

    The host's time is that of queueing a call.
    """
    columns = f"{'µs':>8s}{'TB/s':>8s}{'share':>8s}{'host µs':>9s}{'errors':>24s}"
    lines = [rows[0]["case"], f"  {'':24s}{columns}"]
    for row in rows:
        errors = ", ".join(f"{error:.3%}" for error in row.get("errors", ()))
        if "ms" in row:
            said = f"{1000 * row['ms']:8.1f}{row['tb_per_s']:8.2f}{row['share']:8.3f}"
            said += f"{1000 * row['host_ms']:9.1f}{errors:>24s}"
        elif "failure" in row:
            said = f"  {row['failure']}"
        else:
            said = f"  {'wrong':31s}{errors:>24s}"
        lines.append(f"  {row['direction']:9s}{row['contender']:15s}{said}".rstrip())
    return "\n".join(lines)


def readme_table(report: dict) -> str:
    """Markdown: a line a case, a column a contender, each with time and peak memory."""
    return "\n".join(
        [
            _markdown("forward + backward, ms / GiB", report["results"], _head_and_tokens),
            "",
            f"{_measured(report)}: medians "
            f"in one process, peak memory over the inputs, `{report['command']}`. The bare "
            "products are the matrix products alone, a lower bound for any exact loss.",
        ]
    )


def sweep_table(report: dict) -> str:
    """Markdown: a line a head and number of tokens, a column a contender."""
    return "\n".join(
        [
            _markdown("forward + backward, ms / GiB", report["sweep"], _head_and_tokens),
            "",
            f"{_measured(report)}, `{report['command']}`.",
        ]
    )


def heads_table(report: dict) -> str:
    """Markdown: a line a kind of head, a column a contender, each with time and peak memory."""
    return "\n".join(
        [
            _markdown("forward + backward, ms / GiB", report["heads"], lambda row: row["case"]),
            "",
            f"{_measured(report)}: 8192 tokens, medians in one process, peak memory over the "
            f"inputs, `{report['command']}`.",
        ]
    )


def log_probs_table(report: dict) -> str:
    """Markdown: a line a head, a column a contender, each with time and peak memory."""
    return "\n".join(
        [
            _markdown("forward + backward, ms / GiB", report["log_probs"], lambda row: row["case"]),
            "",
            f"{_measured(report)}: medians in one process, peak memory over the inputs, "
            f"`{report['command']}`. Eager computes the loss alone, TRL and liger_patch entropy "
            "and accuracy too.",
        ]
    )


def sft_steps_table(report: dict) -> str:
    """Markdown: a line a model, a column a contender, each with time and peak memory."""
    return "\n".join(
        [
            _markdown("step of SFTTrainer, ms / GiB", report["sft_steps"], lambda r: r["model"]),
            "",
            f"{_measured(report)}: loss, metrics and backward pass of the whole model with random "
            "weights, every weight trained, 40 % of the labels ignored, without checkpointing; "
            f"medians in one process, peak memory over the weights, `{report['command']}`.",
        ]
    )


def steps_table(report: dict) -> str:
    """Markdown: a line a model, a column a contender, each with time and peak memory."""
    has_floor = any(row["contender"] == FLOOR for row in report["steps"])
    floor = FLOOR_OF_STEPS if has_floor else ""
    return "\n".join(
        [
            _markdown("training step, ms / GiB", report["steps"], lambda row: row["model"]),
            "",
            f"{_measured(report)}: forward and backward of the whole model with random weights, "
            "40 % of the labels ignored, without checkpointing; medians in one process, peak "
            f"memory over the weights, gradients included, `{report['command']}`.{floor}",
        ]
    )


def convergence_table(report: dict) -> str:
    """Markdown: a line a model, a column a contender, each with its last held-out loss."""
    settings = report["settings"]
    return "\n".join(
        [
            losses_table(report),
            "",
            f"{_measured(report)} (autocast over float32 weights): "
            f"{settings['batch_size'] * settings['length']} tokens of Python's standard library a "
            "step, from random weights. Another seed gives other weights and another order of the "
            "text; rounded is seed 0 with each first weight moved by half an eps of bfloat16 at "
            "most. Held-out losses are those of the trained weights in an unpatched model, in "
            f"float32. {judgement(report['convergence'])} `{report['command']}`.",
        ]
    )


def layer_kernels_table(report: dict) -> str:
    """Markdown: a line a case, a column a contender, each with both directions."""
    rows = report["layer_kernels"]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    lines = [["share of a copy's bandwidth, forward / backward (µs)", *contenders]]
    lines.append(["---"] * len(lines[0]))
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        cells = ([row for row in of_case if row["contender"] == name] for name in contenders)
        lines.append([case, *map(_both_directions, cells)])
    return "\n".join(
        [
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            f"{_measured(report)}: medians in one process, `{report['command']}`. The copy moves "
            "as many bytes as the kernel has to read and to write, each once; its own column is "
            "its bandwidth in TB/s, one number where both directions have the same.",
        ]
    )


TABLES = {
    "results": readme_table,
    "sweep": sweep_table,
    "steps": steps_table,
    "heads": heads_table,
    "log_probs": log_probs_table,
    "sft_steps": sft_steps_table,
    "convergence": convergence_table,
    "layer_kernels": layer_kernels_table,
}


def _markdown(title: str, rows: list[dict], line_of: Callable[[dict], str]) -> str:
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {(line_of(row), row["contender"]): _cell(row) for row in rows}
    lines = [[title, *contenders], ["---"] * (1 + len(contenders))]
    for name in dict.fromkeys(line_of(row) for row in rows):
        lines.append([name, *(cells.get((name, contender), "") for contender in contenders)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head_and_tokens(row: dict) -> str:
    head = row["case"].removesuffix(f", N {row['tokens']}")
    return f"{head}, {row['tokens']} tokens"


def _cell(row: dict) -> str:
    if "failure" in row:
        return row["failure"].partition(":")[0]
    if row.get("wrong"):
        errors = row.get("gradient_errors")
        return f"gradient off by {max(errors):.1%}" if errors else "wrong"
    if row["contender"] == FLOOR:
        return f"{row['ms']:.1f}"
    return f"{row['ms']:.1f} / {row['peak_mib'] / 1024:.1f}"


def _both_directions(rows: list[dict]) -> str:
    said = [_share(row) for row in rows]
    if rows and all("share" in row and row["contender"] != COPY for row in rows):
        times = " / ".join(f"{1000 * row['ms']:.0f}" for row in rows)
        return f"{' / '.join(said)} ({times})"
    return " / ".join(dict.fromkeys(said))  # what failed in both directions is said once


def _share(row: dict) -> str:
    if "failure" in row:
        return row["failure"].partition(":")[0]
    if row.get("wrong"):
        return "wrong"
    return f"{row['tb_per_s']:.2f}" if row["contender"] == COPY else f"{row['share']:.2f}"


def _measured(report: dict) -> str:
    used = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"Measured on one {report['gpu']} on {report['date']} in bf16 with {used}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tables of reports.")
    parser.add_argument("reports", nargs="+", type=Path, help="JSON of benchmarks")
    for place in parser.parse_args().reports:
        read = json.loads(place.read_text(encoding="utf-8"))
        for key, table in TABLES.items():
            if read.get(key):
                print(f"{table(read)}\n")


if __name__ == "__main__":
    main()
