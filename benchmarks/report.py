"""A benchmark's report in words: the table on the terminal, and the one in the README.

python benchmarks/report.py benchmarks/results/linear_cross_entropy.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def terminal_table(rows: list[dict]) -> str:
    """The rows of one case: time, how much of it the bare products need, peak memory."""
    lines = [f"{rows[0]['case']}", f"  {'':24s}{'ms':>8s}{'floor/ms':>10s}{'peak MiB':>10s}"]
    for row in rows:
        if row.get("wrong"):
            lines.append(f"  {row['contender']:24s} wrong gradients: {row['gradient_errors']}")
        else:
            lines.append(
                f"  {row['contender']:24s}{row['ms']:8.2f}{row['floor_over_time']:10.3f}"
                f"{row['peak_mib']:10.0f}"
            )
    return "\n".join(lines)


def readme_table(report: dict) -> str:
    """Markdown: a line a case, a column a contender, each with time and peak memory."""
    rows = report["results"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {(row["case"], row["contender"]): _cell(row) for row in rows}
    lines = [["forward + backward, ms / GiB", *contenders], ["---"] * (1 + len(contenders))]
    for case in cases:
        lines.append([case, *(cells.get((case, name), "") for name in contenders)])
    used = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join(
        [
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            f"Measured on one {report['gpu']} on {report['date']} in bf16 with {used}: medians "
            f"in one process, peak memory over the inputs, `{report['command']}`. The bare "
            "products are the matrix products alone, a lower bound for any exact loss.",
        ]
    )


def _cell(row: dict) -> str:
    if row.get("wrong"):
        return f"gradient off by {max(row['gradient_errors']):.1%}"
    if row["contender"] == "bare products":
        return f"{row['ms']:.1f}"
    return f"{row['ms']:.1f} / {row['peak_mib'] / 1024:.1f}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(readme_table(json.loads(Path(argument).read_text())))
