"""Format the tables of heads and kernels: one operator, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from .markdown import (
    TIME_AND_MEMORY,
    Row,
    case_of,
    cells_of,
    document,
    head_and_tokens,
    time_and_memory,
)
from .names import (
    COPY,
    EAGER,
    KERNELS_OF_OTHERS,
    LOWER_BOUND,
    OF_HOPPER,
    OTHER_GPUS,
    OURS,
    PYTORCH,
    QUACK,
    UNSLOTH,
)

BEST_PEER, COMPILED_HEAD = "fastest peer", "torch.compile"
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


def sweep_table(report: dict) -> str:
    return document(
        _of_run(report, "sweep"),
        cells_of(TIME_AND_MEMORY, report["sweep"], head_and_tokens),
        ".",
    )


def idle_table(report: dict) -> str:
    """Format times alone, and in brackets the host's; nothing where none were measured.

    Of the peers, only the fastest one of each head has a place.
    """
    if not report.get("idle"):
        return ""
    by_head: dict[str, list[Row]] = {}
    for row in report["idle"]:
        by_head.setdefault(head_and_tokens(row), []).append(row)
    rows = [row for of_head in by_head.values() for row in _with_best_peer(of_head)]
    note = ": the GPU is idle before each call; in brackets the time until the call returns."
    if any(KERNELS_OF_OTHERS in row["contender"] for row in rows):
        note += OTHERS_SAID
    heading = "forward + backward, ms (host)"
    cells = cells_of(heading, rows, head_and_tokens, _with_host)
    return document(_of_run(report, "idle"), cells, note)


def other_gpus_table(report: dict, key: str = "other_gpus") -> str:
    """Format the kernels of other GPUs, and in brackets the lower bound over each time.

    Args:
        key: of the list; another GPU has one of its own.
    """
    note = ": memory over the inputs; in brackets the matmul-only bound over the time."
    heading = "forward + backward, ms / GiB (bound / time)"
    cells = cells_of(heading, report[key], head_and_tokens, _with_bound)
    return document(_of_run(report, key), cells, note + OTHERS_SAID)


def quack_table(report: dict) -> str:
    """Format the run in which QuACK took part: it, what it is compared with, and ours."""
    kept = (LOWER_BOUND, EAGER, COMPILED_HEAD, OURS)
    rows = [
        row
        for row in report["quack"]
        if row["contender"] in kept or row["contender"].startswith(QUACK)
    ]
    note = ": memory over the inputs."
    cells = cells_of(TIME_AND_MEMORY, rows, head_and_tokens)
    return document(_of_run(report, "quack"), cells, note)


def heads_table(report: dict) -> str:
    note = ": 8192 tokens, memory over the inputs."
    return document(report, cells_of(TIME_AND_MEMORY, report["heads"], case_of), note)


def log_probs_table(report: dict) -> str:
    note = (
        ": memory over the inputs. Eager computes the loss alone, TRL and liger_patch entropy and "
        "accuracy too, Liger-Kernel accuracy, its scaled head and verl's heads entropy."
    )
    return document(report, cells_of(TIME_AND_MEMORY, report["log_probs"], case_of), note)


def distillation_table(report: dict) -> str:
    rows = [
        row | {"peak_mib": row["peak_mib"] - row["gradients_mib"]} if "peak_mib" in row else row
        for row in report["distillation"]
    ]
    note = ": memory over inputs and gradients. The matmul-only bound is the four products alone."
    return document(report, cells_of(TIME_AND_MEMORY, rows, case_of), note)


def layer_kernels_table(report: dict) -> str:
    """Format a line a case, a column a contender; a cell has both directions."""
    rows = report["layer_kernels"]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = [["share of a copy's bandwidth, forward / backward (µs)", *contenders]]
    for case in dict.fromkeys(map(case_of, rows)):
        of_case = [row for row in rows if row["case"] == case]
        both = ([row for row in of_case if row["contender"] == name] for name in contenders)
        cells.append([case, *map(_both_directions, both)])
    note = (
        ". The copy moves as many bytes as the kernel has to read and to write, each once; its "
        "own column is its bandwidth in TB/s, one number where both directions have the same."
    )
    return document(report, cells, note)


def _with_best_peer(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows of one head that are the bound's, eager's and ours, and the best of the others
    in front of ours.
    """
    kept = [LOWER_BOUND, EAGER, OURS, OTHER_GPUS, OF_HOPPER]
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


def _of_run(report: dict, key: str) -> dict:
    """Return the report with command, date, GPU and versions of the run that measured one list."""
    return report | report.get("runs", {}).get(key, {})


def _with_host(row: Row) -> str:
    if "ms" not in row:
        return time_and_memory(row)
    peer = f"{row['peer']}: " if "peer" in row else ""
    return f"{peer}{row['ms']:.2f} ({row['host_ms']:.2f})"


def _with_bound(row: Row) -> str:
    if row["contender"] == LOWER_BOUND or "floor_over_time" not in row:
        return time_and_memory(row)
    return f"{time_and_memory(row)} ({row['floor_over_time']:.2f})"


def _both_directions(rows: list[Row]) -> str:
    shares = [_share(row) for row in rows]
    if rows and all("share" in row and row["contender"] != COPY for row in rows):
        times = " / ".join(f"{1000 * row['ms']:.0f}" for row in rows)
        return f"{' / '.join(shares)} ({times})"
    return " / ".join(dict.fromkeys(shares))  # one word where both directions have the same


def _share(row: Row) -> str:
    if "share" not in row:
        return time_and_memory(row)
    return f"{row['tb_per_s']:.2f}" if row["contender"] == COPY else f"{row['share']:.2f}"
