"""Draw the pictures of a report.

Heads: time over the lower bound against peak memory, and both against the number of tokens.
Training steps: bars of time and peak memory; of LoRA only the first, in large bars, for the README.
Training runs: losses. The longest rows: against the memory of the GPU.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from .convergence_report import by_model
from .names import KERNELS_OF_OTHERS, LOWER_BOUND, OURS

GIB = 1024  # MiB
COLUMNS = 3
OUR_COLOURS = ("black", "dimgray", "darkgray", "lightgray")
PEER_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")  # C7 is grey
TIMES = (1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16)  # ticks, in lower bounds
ROOM_FOR_LABELS = 1.15  # of the highest bar


def draw_all(report: dict, path: Path) -> list[Path]:
    """Draw every list of the report that has a picture, beside ``path``, its place."""
    drawn = []
    for key, ending, draw_part in (
        ("results", "", draw),
        ("sweep", "_sweep", draw_sweep),
        ("steps", "", draw_steps),
        ("lora_steps", "", draw_first_lora),
        ("distributed_steps", "", partial(draw_steps, key="distributed_steps")),
        ("longest_rows", "", draw_longest),
        ("convergence", "", draw_convergence),
    ):
        if any(_is_drawn(row) for row in report.get(key, ())):
            drawn.append(path.with_name(f"{path.stem}{ending}.png"))
            draw_part(report, drawn[-1])
    return drawn


def _is_drawn(row: dict) -> bool:
    if "gib" in row or "timed" in row:
        return bool(row.get("tokens"))
    return row["contender"] != LOWER_BOUND and ("ms" in row or "held_out" in row)


def draw(report: dict, path: Path) -> None:
    """Draw a panel a case, one point a contender: left is less memory, low is less time."""
    rows = [row for row in report["results"] if "ms" in row and row["contender"] != LOWER_BOUND]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    styles = _styles(report)
    columns = min(COLUMNS, len(cases))
    lines = -(-len(cases) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for panel, case in zip(axes.flat, cases, strict=False):
        for row in rows:
            if row["case"] == case:
                panel.scatter(
                    row["peak_mib"] / GIB,
                    1 / row["floor_over_time"],
                    s=60,
                    alpha=0.8,
                    label=row["contender"],
                    **styles[row["contender"]],
                )
        panel.set_title(case, fontsize=10)
        panel.set_xlabel("peak memory over the inputs (GiB)")
        _powers_of_two(panel, panel.xaxis)
        _times(panel)
    for panel in axes.flat[len(cases) :]:
        panel.axis("off")
    _finish(figure, report, path, "forward + backward")


def draw_sweep(report: dict, path: Path) -> None:
    """Draw one line a contender: time over the lower bound above, peak memory below."""
    rows = [row for row in report["sweep"] if "ms" in row and row["contender"] != LOWER_BOUND]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    styles = _styles(report)
    figure, axes = plt.subplots(
        2, len(cases), figsize=(4.6 * len(cases), 6.4), squeeze=False, layout="constrained"
    )
    for column, case in zip(axes.T, cases, strict=True):
        for contender, style in styles.items():
            line = [row for row in rows if (row["case"], row["contender"]) == (case, contender)]
            if not line:
                continue
            tokens = [row["tokens"] for row in line]
            for panel, values in zip(
                column,
                (
                    [1 / row["floor_over_time"] for row in line],
                    [row["peak_mib"] / GIB for row in line],
                ),
                strict=True,
            ):
                panel.plot(tokens, values, label=contender, **style)
        column[0].set_title(case, fontsize=10)
        time_panel, memory_panel = column
        for panel in column:
            panel.set_xlabel("tokens")
            _powers_of_two(panel, panel.xaxis)
        _times(time_panel)
        memory_panel.set_ylabel("peak memory over the inputs (GiB)")
        _powers_of_two(memory_panel, memory_panel.yaxis)
    _finish(figure, report, path, "forward + backward")


def draw_steps(report: dict, path: Path, key: str = "steps") -> None:
    """Draw a group of bars a model: time on the left, peak memory on the right."""
    rows = [row for row in report[key] if "ms" in row]
    bounds = {row["model"]: row["ms"] for row in rows if row["contender"] == LOWER_BOUND}
    rows = [row for row in rows if row["contender"] != LOWER_BOUND]
    models = list(dict.fromkeys(row["model"] for row in rows))
    places = [(models.index(model), ms) for model, ms in bounds.items() if model in models]
    styles = _styles(report)
    height = 0.8 / len(styles)
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 1.2 + 1.1 * len(models)), sharey=True, layout="constrained"
    )
    for panel, title, field, unit in (
        (axes[0], "ms", "ms", 1),
        (axes[1], "peak memory over the weights (GiB)", "peak_mib", GIB),
    ):
        for position, (contender, style) in enumerate(styles.items()):
            values = {row["model"]: row[field] for row in rows if row["contender"] == contender}
            bars = panel.barh(
                [models.index(model) + (position + 0.5) * height - 0.4 for model in values],
                [value / unit for value in values.values()],
                height,
                label=contender,
                color=style["color"],
            )
            panel.bar_label(bars, fmt="{:.3g}", padding=2, fontsize=7)
        panel.set_xlabel(title)
        panel.set_xlim(right=ROOM_FOR_LABELS * max(row[field] / unit for row in rows))
        panel.grid(axis="x", alpha=0.3)
    for place, ms in places:
        ends = [place - 0.4, place + 0.4]
        axes[0].plot([ms, ms], ends, color="C7", linestyle="--", label=LOWER_BOUND)
    axes[0].set_yticks(range(len(models)), models)
    axes[0].invert_yaxis()
    _finish(figure, report, path, "training step")


def draw_first_lora(report: dict, path: Path) -> None:
    """Draw time and peak memory of the first model, one bar a contender."""
    first = report["lora_steps"][0]["model"]
    rows = [r for r in report["lora_steps"] if r["model"] == first and "peak_mib" in r]
    rows = [row for row in rows if row["contender"] != LOWER_BOUND]
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.9 + 0.75 * len(rows)), layout="constrained")
    for panel, title, field, unit in (
        (axes[0], "ms a step", "ms", 1),
        (axes[1], "GiB at the peak", "peak_mib", GIB),
    ):
        values = [row[field] / unit for row in rows]
        colours = ["black" if row["contender"] == OURS else "silver" for row in rows]
        bars = panel.barh([row["contender"] for row in rows], values, 0.7, color=colours)
        panel.bar_label(bars, fmt="{:.1f}", padding=4, fontsize=20, fontweight="bold")
        panel.set_title(title, fontsize=17)
        panel.set_xlim(right=1.3 * max(values))
        panel.tick_params(axis="y", length=0, labelsize=17)
        panel.set_xticks([])
        panel.spines[:].set_visible(False)
        panel.invert_yaxis()
    axes[1].set_yticks([])
    figure.suptitle(f"{first}, bf16, {report['gpu']}", fontsize=17)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_longest(report: dict, path: Path) -> None:
    """Draw a panel a model: the longest row against the memory, one line a contender.

    An arrow is a lower bound, on no line, and drawn where it is first known; a hollow point is a
    row that ends for want of something else than the GPU's memory.
    """
    rows = [row for row in report["longest_rows"] if "gib" in row and _is_drawn(row)]
    models = list(dict.fromkeys(row["model"] for row in rows))
    styles = _styles(report)
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(max(7.0, 5.2 * columns), 0.6 + 3.8 * lines),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for panel in axes.flat[len(models) :]:
        panel.axis("off")
    for panel, model in zip(axes.flat, models, strict=False):
        for contender, style in styles.items():
            line = [row for row in rows if (row["model"], row["contender"]) == (model, contender)]
            line.sort(key=lambda row: row["gib"])
            line = [row for i, row in enumerate(line) if not _repeats(line[:i], row)]
            places = [(row["gib"], row["tokens"]) for row in line]
            if not places:
                continue
            found = [p for row, p in zip(line, places, strict=True) if not row.get("at_least")]
            panel.plot([x for x, _ in found], [y for _, y in found], label=contender, **style)
            for row, place in zip(line, places, strict=True):
                if row.get("at_least"):
                    panel.plot(*place, **style)
                    length, colour = place[1] / 6, style["color"]
                    panel.errorbar(*place, yerr=length, lolims=True, fmt="none", color=colour)
                if "ends_with" in row:
                    panel.plot(*place, **style, markerfacecolor="white")
                text = f"{'≥ ' if row.get('at_least') else ''}{row['tokens'] / 1000:,.0f}k"
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
                panel.annotate(
                    text, place, (7, -3), textcoords="offset points", fontsize=7, bbox=box
                )
        panel.set_title(model, fontsize=10)
        panel.set_xlabel("memory of the GPU (GiB)")
        panel.set_xticks(sorted({row["gib"] for row in rows}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.margins(x=0.1)
        _powers_of_two(panel, panel.yaxis)
        panel.yaxis.set_major_formatter("{x:,.0f}")
    for panel in axes[:, 0]:
        panel.set_ylabel("longest row (tokens)")
    _finish(figure, report, path, "longest row that trains")


def _repeats(before: list[dict], row: dict) -> bool:
    """Return whether a lower bound is that of less memory already."""
    return bool(row.get("at_least")) and any(each["tokens"] >= row["tokens"] for each in before)


def draw_convergence(report: dict, path: Path) -> None:
    """Draw losses above, and below how far the held-out ones are from the first run's."""
    models, settings = by_model(report["convergence"]), report["settings"]
    styles, evaluated = _styles(report), settings["evaluated_after"]
    figure, axes = plt.subplots(
        2, len(models), figsize=(4.6 * len(models), 7.2), squeeze=False, layout="constrained"
    )
    for (losses, apart), (model, runs) in zip(axes.T, models.items(), strict=True):
        for run in runs:
            style, steps = styles[run["contender"]], range(1, settings["steps"] + 1)
            losses.plot(steps, run["training"], color=style["color"], lw=0.4, alpha=0.5)
            losses.plot(evaluated, run["held_out"], label=run["contender"], ms=3, **style)
            differences = [
                abs(a - b) or math.nan  # a logarithmic axis has no place for "equal"
                for a, b in zip(run["held_out"], runs[0]["held_out"], strict=True)
            ]
            apart.plot(evaluated, differences, ms=4, **style)
        losses.set_title(model, fontsize=10)
        apart.set_yscale("log")
        apart.yaxis.set_major_formatter("{x:g}")
        apart.yaxis.set_minor_formatter("")
        for panel in (losses, apart):
            panel.set_xlabel("step")
            panel.grid(alpha=0.3)
    axes[0, 0].set_ylabel("loss in nats: held-out (thin: training)")
    axes[1, 0].set_ylabel(f"|held-out loss - that of {report['convergence'][0]['contender']}|")
    _finish(figure, report, path, f"{settings['steps']} training steps")


def _styles(report: dict) -> dict[str, dict]:
    """Return each contender's colour and marker: ours in black, the default, and greys, alike in
    all panels; with the kernels of other GPUs, triangles.
    """
    rows = [
        row
        for key in ("results", "sweep", "steps", "distributed_steps", "longest_rows", "convergence")
        for row in report.get(key, ())
    ]
    styles, peers, own = {}, 0, 0
    names = dict.fromkeys(row["contender"] for row in rows if row["contender"] != LOWER_BOUND)
    for contender in sorted(names, key=lambda name: name != OURS):
        if contender.startswith("liger_patch"):
            marker = "^" if KERNELS_OF_OTHERS in contender else "o"
            styles[contender] = {"color": OUR_COLOURS[own % len(OUR_COLOURS)], "marker": marker}
            own += 1
        else:
            styles[contender] = {"color": PEER_COLOURS[peers % len(PEER_COLOURS)], "marker": "s"}
            peers += 1
    return styles


def _powers_of_two(panel: Axes, axis: Axis) -> None:
    (panel.set_xscale if axis is panel.xaxis else panel.set_yscale)("log", base=2)
    axis.set_major_formatter("{x:.5g}")
    axis.set_tick_params(labelsize=8)
    panel.grid(alpha=0.3)


def _times(panel: Axes) -> None:
    """Make the vertical axis time over the lower bound, from 1."""
    panel.set_ylabel(f"time / {LOWER_BOUND}")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(FixedLocator(TIMES))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_ylim(bottom=min(1.0, panel.get_ylim()[0]))
    panel.grid(alpha=0.3)


def _finish(figure: Figure, report: dict, path: Path, what: str) -> None:
    handles = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9)
    versions = report["versions"]
    figure.suptitle(
        f"{report['gpu']}, torch {versions['torch']}, triton {versions['triton']}, bf16, {what}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
