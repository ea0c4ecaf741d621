"""Format the parts of tables that only LoRA steps have: first steps, and ratios to Unsloth."""

from __future__ import annotations

from .names import OURS

PEER = "Unsloth"
RATIO = f"{OURS} / {PEER}, time and memory"


def terminal_lora_table(rows: list[dict]) -> str:
    """Format the rows of one model: time, also over Unsloth's, peak memory, first step, loss."""
    columns = f"{'ms':>10s}{'/ Unsloth':>11s}{'peak GiB':>10s}{'first s':>9s}"
    columns += f"{'loss':>10s}{'gradient':>12s}"
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        of_name = [row for row in rows if row["model"] == name]
        peer = _ms(of_name, PEER)
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
        if OURS in timed and PEER in timed:
            ours, peer = timed[OURS], timed[PEER]
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
