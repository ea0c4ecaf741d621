"""Patched against unpatched: do they agree, as a table and as a picture."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from training import Run, Settings

# Both differences are rounding errors, drawn once: over the registry's 33 text architectures their
# ratio was at most 2.5, in float32 and in bfloat16. A head gradient wrong by 0.1 % made it 1,000.
ALLOWED_OVER_CONTROL = 10
ROWS = 10  # steps shown in the table
UNPATCHED_COLOR, PATCHED_COLOR, CONTROL_COLOR = "#8a8f98", "#d1495b", "#30638e"


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one figure from the unpatched run's."""

    figure: str
    patched: float
    control: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.patched <= self.allowed  # False for nan


def differences(runs: dict[str, Run]) -> list[Difference]:
    """What the patch changed, against what a change of the weights within rounding changed.

    Allowed is ALLOWED_OVER_CONTROL times the control's difference; where the control differs by
    less than a float32 eps, which is what a loss is rounded to, that many eps.
    """
    rows = []
    for figure, values in [("loss", all_losses), ("gradient norm", gradient_norms)]:
        patched = float(np.max(relative_difference(values, runs, "patched")))
        control = float(np.max(relative_difference(values, runs, "control")))
        allowed = ALLOWED_OVER_CONTROL * max(control, float(np.finfo(np.float32).eps))
        rows.append(Difference(figure, patched, control, allowed))
    return rows


def all_losses(run: Run) -> np.ndarray:
    return np.array([*run.loss, run.evaluation_loss])


def gradient_norms(run: Run) -> np.ndarray:
    return np.array(run.grad_norm)


def relative_difference(
    values: Callable[[Run], np.ndarray], runs: dict[str, Run], variant: str
) -> np.ndarray:
    unpatched = values(runs["unpatched"])
    return np.abs(values(runs[variant]) - unpatched) / np.abs(unpatched)


def title(settings: Settings, run: Run) -> str:
    each = " a process" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return (
        f"{settings.model_type}, {run.parameters / 1e6:.1f} M parameters, "
        f"vocabulary {settings.vocab_size:,}\n{settings.steps} steps of "
        f"{settings.tokens_per_step:,} tokens{each}, {settings.dtype} on {settings.device}"
    )


def table(settings: Settings, runs: dict[str, Run], rows: list[Difference]) -> str:
    unpatched, patched = runs["unpatched"], runs["patched"]
    saved = 1 - patched.peak_memory_mib / unpatched.peak_memory_mib
    steps = np.unique(np.linspace(1, settings.steps, ROWS).round().astype(int))
    lines = [title(settings, patched), ""]

    lines.append(f"{'training loss':24}{'unpatched':>12}{'patched':>12}{'difference':>13}")
    for step in steps:
        before, after = unpatched.loss[step - 1], patched.loss[step - 1]
        lines.append(f"{f'  step {step}':24}{before:12.6f}{after:12.6f}{after - before:13.1e}")
    before, after = unpatched.evaluation_loss, patched.evaluation_loss
    lines.append(f"{'evaluation loss':24}{before:12.6f}{after:12.6f}{after - before:13.1e}")
    lines += speed_lines(settings.tokens_per_step, unpatched.step_seconds, patched.step_seconds)
    lines.append(
        f"{'peak MiB over weights':24}{unpatched.peak_memory_mib:12,.0f}"
        f"{patched.peak_memory_mib:12,.0f}{-saved:13.0%}"
    )

    if patched.ordinary_because:
        lines.append(f"the patched run was not fused: {patched.ordinary_because}")

    lines += ["", "largest relative difference from unpatched"]
    lines.append(f"{'':24}{'patched':>12}{'control':>12}{'allowed':>13}")
    for row in rows:
        lines.append(f"  {row.figure:22}{row.patched:12.1e}{row.control:12.1e}{row.allowed:13.1e}")
    lines.append(
        f"control: unpatched again, each weight moved by {settings.dtype} rounding at the start\n"
        f"allowed: {ALLOWED_OVER_CONTROL} times the control, or {ALLOWED_OVER_CONTROL} float32 eps"
    )
    return "\n".join(lines)


def speed_lines(tokens: int, unpatched: list[float], patched: list[float]) -> list[str]:
    """Tokens per second, median and quartiles of the steps; beside them, how much more the patched
    ones are.
    """
    figures = [tokens / np.array(steps) for steps in (unpatched, patched)]
    lines = []
    for name, share in [
        ("tokens per second", 0.5),
        ("  lower quartile", 0.25),
        ("  upper quartile", 0.75),
    ]:
        slow, fast = (np.quantile(each, share) for each in figures)
        lines.append(f"{name:24}{slow:12,.0f}{fast:12,.0f}{fast / slow - 1:+13.0%}")
    return lines


def verdict(settings: Settings, rows: list[Difference]) -> str:
    wrong = [row.figure for row in rows if not row.agrees]
    if wrong:
        return f"patched and unpatched DISAGREE in {', '.join(wrong)}, beyond {settings.dtype}."
    return f"patched and unpatched AGREE, as closely as {settings.dtype} allows."


def picture(settings: Settings, runs: dict[str, Run], rows: list[Difference], path: Path) -> None:
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    losses, gaps, memory = figure.subplots(1, 3, width_ratios=[5, 5, 2.6])
    figure.suptitle(title(settings, runs["patched"]), fontsize=11)
    steps = np.arange(1, settings.steps + 1)

    losses.plot(steps, runs["unpatched"].loss, color=UNPATCHED_COLOR, lw=4, label="unpatched")
    losses.plot(steps, runs["patched"].loss, color=PATCHED_COLOR, lw=1.6, ls="--", label="patched")
    losses.set(xlabel="step", ylabel="training loss, nats per token", title="Loss")
    losses.legend(frameon=False)

    markers = [("control", CONTROL_COLOR, "o"), ("patched", PATCHED_COLOR, "x")]
    for variant, color, marker in markers:
        gap = relative_difference(all_losses, runs, variant)[:-1]  # the steps alone
        seen = gap > 0  # a logarithmic axis has no place for "equal"
        gaps.plot(steps[seen], gap[seen], marker, color=color, ms=4, label=variant)
    gaps.axhline(rows[0].allowed, color="black", lw=1, ls=":", label="allowed")
    gaps.set_yscale("log")
    gaps.set(
        xlabel="step",
        ylabel="relative difference",
        title="Difference of the loss from unpatched",
    )
    gaps.legend(frameon=False, loc="best")

    peaks = [runs[variant].peak_memory_mib for variant in ("unpatched", "patched")]
    bars = memory.bar(
        ["unpatched", "patched"], peaks, color=[UNPATCHED_COLOR, PATCHED_COLOR], width=0.6
    )
    memory.bar_label(bars, [f"{peak:,.0f}" for peak in peaks], padding=2)
    memory.margins(y=0.12)
    memory.set(ylabel="MiB over the weights", title="Peak memory")

    for axes in (losses, gaps, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
