"""Format the tables of a report in Markdown, for README and docs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .convergence_report import judgement, losses
from .drift_report import FACTOR, drifts, verdicts
from .longest_report import (
    attention_note,
    check_cells,
    longest_cells,
    longest_sentence,
    runs_note,
)
from .lora_report import RATIO, first_steps, ratios

RESULTS = Path(__file__).parent / "results"
LOWER_BOUND = "matmul-only bound"
EAGER, OURS = "eager", "liger_patch"
KERNELS_OF_OTHERS = "other GPUs"  # of ours, on a Hopper GPU
BEST_PEER = "fastest peer"
PYTORCH, QUACK = "PyTorch", "QuACK"
PEERS = {  # of a head, which are often not installed -> what they are
    PYTORCH: "PyTorch's own linear_cross_entropy (torch 2.13)",
    QUACK: "QuACK",
}
COPY = "copy"
TIME_AND_MEMORY = "forward + backward, ms / GiB"
SUMMARY = {  # contenders of training steps -> columns of the README's table
    "eager": "eager",
    "torch.compile": "torch.compile",
    "Liger, all kernels": "Liger-Kernel",
    "liger_patch, layers": "liger_patch",
}
HEADLINE = "Llama-3.2-1B, 8 x 2048"
OTHERS_SAID = f" With {KERNELS_OF_OTHERS}: the kernels that GPUs other than Hopper run."

Row = dict


def read(path: Path) -> dict:
    """Read a report. Those of before November 23, 2026 have another command and another name of
    the lower bound. ``runs`` says how those of its lists were measured that are of another run.
    """
    text = path.read_text(encoding="utf-8").replace('"bare products"', f'"{LOWER_BOUND}"')
    report = json.loads(text)
    was = r"python benchmarks/(\w+)\.py"
    return report | {"command": re.sub(was, r"python -m benchmarks \1", report["command"])}


def distributed_table(report: dict) -> str:
    rows = report["distributed_steps"]
    differ = [f"{row['model']}, {row['contender']}" for row in _with_other_collectives(rows)]
    said = f"not those of eager: {'; '.join(differ)}" if differ else "those of eager in every row"
    note = (
        ": forward and backward, time of the slowest rank, peak memory of a rank over its shards "
        f"of the weights, {{command}}. Collectives, by kind, size and number: {said}."
    )
    cells = _cells("training step, ms / GiB a GPU", rows, _model)
    return _document(report, cells, note)


def distributed_heads_table(report: dict) -> str:
    note = (
        ": a vocabulary over all GPUs, forward and backward; time of the slowest rank, peak memory "
        "over the inputs, gradients included; {command}. One shard alone is the operator on a "
        "rank's part as if it were the whole vocabulary, without communication."
    )
    cells = _cells(TIME_AND_MEMORY, report["distributed_heads"], _model)
    return _document(report, cells, note)


def _with_other_collectives(rows: list[Row]) -> list[Row]:
    """Return the rows whose collectives are not those of eager in the same step."""
    measured = [row for row in rows if "collectives" in row]
    eager = {row["model"]: row for row in measured if row["contender"] == "eager"}
    return [
        row
        for row in measured
        if _kinds_and_sizes(row) != _kinds_and_sizes(eager.get(row["model"], row))
    ]


def _kinds_and_sizes(row: Row) -> list[tuple]:
    return sorted((each["kind"], each["mib"], each["calls"]) for each in row["collectives"])


def readme_table(report: dict) -> str:
    note = (
        ": medians in one process, peak memory over the inputs, {command}. The matmul-only bound "
        "is the matrix products alone, a lower bound for any exact loss."
    )
    contenders = {row["contender"] for row in report["results"]}
    if absent := [what for name, what in PEERS.items() if name not in contenders]:
        note += f" Not installed: {', '.join(absent)}."
    if any(KERNELS_OF_OTHERS in name for name in contenders):
        note += OTHERS_SAID
    return _document(report, _cells(TIME_AND_MEMORY, report["results"], _head_and_tokens), note)


def idle_table(report: dict) -> str:
    """Format times alone, and in brackets the host's; nothing where none were measured.

    Of the peers, only the fastest one of each head has a place.
    """
    if not report.get("idle"):
        return ""
    by_head: dict[str, list[Row]] = {}
    for row in report["idle"]:
        by_head.setdefault(_head_and_tokens(row), []).append(row)
    rows = [row for of_head in by_head.values() for row in _with_best_peer(of_head)]
    note = (
        ": the GPU is idle before each call; medians in one process, in brackets the time until "
        "the call returns, {command}."
    )
    if any(KERNELS_OF_OTHERS in row["contender"] for row in rows):
        note += OTHERS_SAID
    heading = "forward + backward, ms (host)"
    cells = _cells(heading, rows, _head_and_tokens, _with_host)
    return _document(_of_run(report, "idle"), cells, note)


def other_gpus_table(report: dict) -> str:
    """Format the kernels of other GPUs, and in brackets the lower bound over each time."""
    note = (
        ": medians in one process, peak memory over the inputs; in brackets the matmul-only bound "
        "over the time, {command}."
    )
    heading = "forward + backward, ms / GiB (bound / time)"
    cells = _cells(heading, report["other_gpus"], _head_and_tokens, _with_bound)
    return _document(_of_run(report, "other_gpus"), cells, note + OTHERS_SAID)


def _with_best_peer(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows of one head that are the bound's, eager's and ours, and the best of the others
    in front of ours.
    """
    kept = [LOWER_BOUND, EAGER, OURS, f"{OURS}, {KERNELS_OF_OTHERS}"]
    own = [row for row in rows if row["contender"] in kept]
    peers = [
        row
        for row in rows
        if "ms" in row and row["contender"] not in kept and not row["contender"].startswith(OURS)
    ]
    yield from (row for row in own if not row["contender"].startswith(OURS))
    if peers:
        best = min(peers, key=lambda row: row["ms"])
        yield {**best, "contender": BEST_PEER, "peer": best["contender"]}
    yield from (row for row in own if row["contender"].startswith(OURS))


def headline(report: dict) -> str:
    """Say in a sentence what eager and we need for one training step."""
    rows = {
        SUMMARY.get(row["contender"]): row for row in report["steps"] if row["model"] == HEADLINE
    }
    eager, ours = rows["eager"], rows["liger_patch"]
    name, batch = HEADLINE.split(", ")
    return (
        f"**A training step of {name} on {batch} tokens needs {ours['peak_mib'] / 1024:.1f} GiB "
        f"over the weights instead of {eager['peak_mib'] / 1024:.1f} GiB, and takes "
        f"{ours['ms']:.0f} ms instead of {eager['ms']:.0f} ms** (forward and backward, bf16, one "
        f"{report['gpu']})."
    )


def summary_table(report: dict, compiled: dict) -> str:
    """Format a line a model, a column for each of SUMMARY; torch.compile's from another run."""
    cells, of_other_run = (
        {(row["model"], row["contender"]): row for row in each["steps"]}
        for each in (report, compiled)
    )
    shared = [key for key in cells if key in of_other_run and key[1] in SUMMARY]
    slower = max(of_other_run[key]["ms"] / cells[key]["ms"] for key in shared) - 1
    found, missing = of_other_run | cells, {"failure": "not measured"}
    rows = [
        {**found.get((model, contender), missing), "model": model, "contender": column}
        for model in dict.fromkeys(map(_model, report["steps"]))
        if "LoRA" not in model  # lora_summary has those, beside Unsloth
        for contender, column in SUMMARY.items()
    ]
    note = (
        ": forward and backward of the whole model with random weights, 40 % of the labels "
        "ignored, without checkpointing; medians, peak memory over the weights, {command}. The "
        "column of torch.compile is from other runs, in which the same contenders took up to "
        f"{100 * slower:.0f} % longer."
    )
    return _document(report, _cells("training step, ms / GiB", rows, _model), note)


def sweep_table(report: dict) -> str:
    return _document(
        report, _cells(TIME_AND_MEMORY, report["sweep"], _head_and_tokens), ", {command}."
    )


def heads_table(report: dict) -> str:
    note = ": 8192 tokens, medians in one process, peak memory over the inputs, {command}."
    return _document(report, _cells(TIME_AND_MEMORY, report["heads"], _case), note)


def log_probs_table(report: dict) -> str:
    note = (
        ": medians in one process, peak memory over the inputs, {command}. Eager computes the loss "
        "alone, TRL and liger_patch entropy and accuracy too."
    )
    return _document(report, _cells(TIME_AND_MEMORY, report["log_probs"], _case), note)


def sft_steps_table(report: dict) -> str:
    note = (
        ": loss, metrics and backward pass of the whole model with random weights, every weight "
        "trained, 40 % of the labels ignored, without checkpointing; medians in one process, peak "
        "memory over the weights, {command}."
    )
    return _document(
        report, _cells("step of SFTTrainer, ms / GiB", report["sft_steps"], _model), note
    )


def steps_table(report: dict) -> str:
    note = (
        ": forward and backward of the whole model with random weights, 40 % of the labels "
        "ignored, without checkpointing; medians in one process, peak memory over the weights, "
        "gradients included, {command}."
    )
    if any(row["contender"] == LOWER_BOUND for row in report["steps"]):
        note += (
            " The matmul-only bound is the matrix products and attentions of eager's step alone, "
            "the head's for supervised tokens only."
        )
    return _document(report, _cells("training step, ms / GiB", report["steps"], _model), note)


def lora_steps_table(report: dict) -> str:
    rows = report["lora_steps"]
    cells, ratio_of = _cells("training step, ms / GiB", rows, _model), ratios(rows)
    cells = [[*line, ratio_of.get(line[0], "")] for line in cells]
    cells[0][-1] = RATIO
    note = (
        " (autocast): forward and backward of the whole model with random weights, 40 % of the "
        "labels ignored, adapters of rank 16 in float32 on all linear layers but the head; one "
        "process a contender, medians, peak memory with the weights, {command}. The longest first "
        f"step, kernels compiled: {first_steps(rows)}."
    )
    if any(row["contender"] == LOWER_BOUND for row in rows):
        note += (
            " The matmul-only bound is the matrix products and attentions of eager's step alone, "
            "the head's for supervised tokens only."
        )
    return _document(report, cells, note)


def lora_summary(report: dict) -> str:
    """Format two lines a model, without the bound: all are in docs/lora.md.

    The date of a row that is not shown, in brackets, is left out.
    """
    ends = (", LoRA", ", QLoRA + checkpointing")
    of_both = {row["model"].removesuffix(ends[0]) for row in report["lora_steps"]}
    names = {f"{model}{end}" for model in of_both for end in ends}
    rows = [
        row
        for row in report["lora_steps"]
        if row["contender"] != LOWER_BOUND and row["model"] in names
    ]
    note = (
        " (autocast): forward and backward, random weights, 40 % of the labels ignored, adapters "
        "of rank 16 in float32 on all linear layers but the head; medians, peak memory with the "
        f"weights. The longest first step, kernels compiled: {first_steps(rows)}."
    )
    date, of_others = report["date"].partition(" (")[::2]
    if any(name in of_others for name in names):
        date = report["date"]
    cells = _cells("LoRA step, ms / GiB", rows, _model)
    return _document(report | {"date": date}, cells, note)


def longest_rows_table(report: dict) -> str:
    rows = report["longest_rows"]
    note = (
        " (autocast): forward and backward of one row through the whole model with random weights, "
        "gradient checkpointing, adapters of rank 16 in float32; one process a contender, memory "
        f"limited by PyTorch's allocator, rows in steps of 8192 tokens or 2 %, {{command}}. "
        f"{attention_note(rows)}{runs_note(rows)}"
    )
    return _document(report, longest_cells(rows), note)


def longest_summary(report: dict) -> str:
    """Say in a sentence what fits the least memory: docs/memory.md has the others, and times."""
    said = longest_sentence(report["longest_rows"])
    return f"{said}: [all lengths, and how they were measured](docs/memory.md#the-longest-row)."


def long_row_check_table(report: dict) -> str:
    note = (
        " (autocast): one row through the whole model with random weights, QLoRA with adapters of "
        "rank 16 in float32, gradient checkpointing, checkpoint_offload=True, attention within "
        "blocks of 8192 tokens, {command}. Errors by norm, against the blocks one by one in "
        "float32; eager computes the same blocks. A gradient may have twice eager's error."
    )
    return _document(report, check_cells(report["long_row_check"]), note)


def convergence_table(report: dict) -> str:
    tokens = report["settings"]["batch_size"] * report["settings"]["length"]
    has_adapters = any(" + " in row["model"] for row in report["convergence"])
    weights = "a frozen base, with adapters in float32" if has_adapters else "float32 weights"
    note = (
        f" (autocast over {weights}): {tokens} tokens of Python's standard library a step, "
        "from random weights. Another seed gives other weights and another order of the text; "
        "rounded is seed 0 with each first weight moved by half an eps of bfloat16 at most. "
        "Held-out losses are those of the trained weights in an unpatched model, without autocast. "
        f"{judgement(report['convergence'])} {{command}}."
    )
    return _document(report, losses(report), note)


def drift_table(report: dict) -> str:
    said = ", ".join(f"{v.engine} {v}" for v in verdicts(report["distributed_convergence"]))
    note = (
        f", {report['settings']['steps']} steps of Trainer. Rounded: each first weight moved by "
        f"half an eps at most. A patched run may drift {FACTOR:g} times as far as eager's own runs "
        f"do: {said}. {{command}}."
    )
    return _document(report, drifts(report), note)


def layer_kernels_table(report: dict) -> str:
    """Format a line a case, a column a contender; a cell has both directions."""
    rows = report["layer_kernels"]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = [["share of a copy's bandwidth, forward / backward (µs)", *contenders]]
    for case in dict.fromkeys(map(_case, rows)):
        of_case = [row for row in rows if row["case"] == case]
        both = ([row for row in of_case if row["contender"] == name] for name in contenders)
        cells.append([case, *map(_both_directions, both)])
    note = (
        ": medians in one process, {command}. The copy moves as many bytes as the kernel has to "
        "read and to write, each once; its own column is its bandwidth in TB/s, one number where "
        "both directions have the same."
    )
    return _document(report, cells, note)


TABLES: dict[str, Callable[[dict], str]] = {  # of a report's lists, in Markdown
    "results": readme_table,
    "sweep": sweep_table,
    "idle": idle_table,
    "other_gpus": other_gpus_table,
    "steps": steps_table,
    "heads": heads_table,
    "log_probs": log_probs_table,
    "sft_steps": sft_steps_table,
    "lora_steps": lora_steps_table,
    "longest_rows": longest_rows_table,
    "long_row_check": long_row_check_table,
    "distributed_steps": distributed_table,
    "distributed_heads": distributed_heads_table,
    "convergence": convergence_table,
    "distributed_convergence": drift_table,
    "layer_kernels": layer_kernels_table,
}


def tables(report: dict) -> list[str]:
    """Return the table of each list that the report has."""
    return [table(report) for key, table in TABLES.items() if report.get(key)]


def _of_run(report: dict, key: str) -> dict:
    """Return the report with command, date and versions of the run that measured one list."""
    return report | report.get("runs", {}).get(key, {})


def _document(report: dict, cells: list[list[str]], note: str) -> str:
    """Format cells, the first line as heading, and what was measured, where and how."""
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rows = [row for value in report.values() if isinstance(value, list) for row in value]
    count = max((row.get("gpus", 1) for row in rows), default=1)
    where = f"one {report['gpu']}" if count == 1 else f"{count} GPUs ({report['gpu']})"
    measured = f"Measured on {where} on {report['date']} in bf16 with {versions}"
    note = note.replace("{command}", f"`{report['command']}`")
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", measured + note])


def _cells(
    heading: str,
    rows: list[Row],
    line_of: Callable[[Row], str],
    cell_of: Callable[[Row], str] | None = None,
) -> list[list[str]]:
    """Return a line a case or model and a column a contender, each with time and peak memory, or
    with what ``cell_of`` says.
    """
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    found = {(line_of(row), row["contender"]): (cell_of or _cell)(row) for row in rows}
    names = dict.fromkeys(map(line_of, rows))
    lines = ([name, *(found.get((name, each), "") for each in contenders)] for name in names)
    return [[heading, *contenders], *lines]


def _case(row: Row) -> str:
    return row["case"]


def _model(row: Row) -> str:
    return row["model"]


def _head_and_tokens(row: Row) -> str:
    head = row["case"].removesuffix(f", N {row['tokens']}")
    return f"{head}, {row['tokens']} tokens"


def _cell(row: Row) -> str:
    if "failure" in row:
        return row["failure"].partition(":")[0]
    if row.get("wrong"):
        errors = row.get("gradient_errors")
        return f"gradient off by {max(errors):.1%}" if errors else "wrong"
    if row["contender"] == LOWER_BOUND:
        return f"{row['ms']:.1f}"
    if not row.get("fused", True):
        return "not fused"
    return f"{row['ms']:.1f} / {row['peak_mib'] / 1024:.1f}"


def _with_host(row: Row) -> str:
    if "ms" not in row:
        return _cell(row)
    peer = f"{row['peer']}: " if "peer" in row else ""
    return f"{peer}{row['ms']:.2f} ({row['host_ms']:.2f})"


def _with_bound(row: Row) -> str:
    if row["contender"] == LOWER_BOUND or "floor_over_time" not in row:
        return _cell(row)
    return f"{_cell(row)} ({row['floor_over_time']:.2f})"


def _both_directions(rows: list[Row]) -> str:
    shares = [_share(row) for row in rows]
    if rows and all("share" in row and row["contender"] != COPY for row in rows):
        times = " / ".join(f"{1000 * row['ms']:.0f}" for row in rows)
        return f"{' / '.join(shares)} ({times})"
    return " / ".join(dict.fromkeys(shares))  # one word where both directions have the same


def _share(row: Row) -> str:
    if "share" not in row:
        return _cell(row)
    return f"{row['tb_per_s']:.2f}" if row["contender"] == COPY else f"{row['share']:.2f}"
