"""A picture of a benchmark's report: time over the floor against peak memory, one panel a case.

python benchmarks/picture.py outputs/benchmarks/linear_cross_entropy.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = 3


def draw(report: dict, path: Path) -> None:
    """One point a contender: left is less memory, low is close to the bare products."""
    cases = list(dict.fromkeys(row["case"] for row in report["results"]))
    columns = min(COLUMNS, len(cases))
    lines = -(-len(cases) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    contenders = list(dict.fromkeys(row["contender"] for row in report["results"] if "ms" in row))
    contenders.remove("bare products")
    for panel, case in zip(axes.flat, cases, strict=False):
        for row in report["results"]:
            if row["case"] != case or row["contender"] not in contenders or "ms" not in row:
                continue
            ours = row["contender"].startswith("liger_patch")
            panel.scatter(
                row["peak_mib"] / 1024,
                1 / row["floor_over_time"],
                s=60,
                marker="o" if ours else "s",
                color=f"C{contenders.index(row['contender'])}",
                label=row["contender"],
            )
        panel.set_title(case, fontsize=10)
        panel.set_xlabel("peak memory over the inputs (GiB)")
        panel.set_ylabel("time / bare products")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_ylim(bottom=1.0)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(cases) :]:
        panel.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    versions = report["versions"]
    figure.suptitle(
        f"{report['gpu']}, torch {versions['torch']}, triton {versions['triton']}, bf16, "
        "forward + backward",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(json.loads(Path(argument).read_text()), Path(argument).with_suffix(".png"))
