"""Format the rows of one case for the terminal, as soon as it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Row = dict


def terminal_table(rows: list[Row]) -> str:
    """Format one head: time, the lower bound's share of it, memory, errors of the gradients."""

    def line(row: Row) -> str:
        errors = _percent(row.get("gradient_errors", ()))
        if "ms" not in row:
            return "  " + row.get("failure", f"{'wrong gradients':26s}{errors:>20s}")
        numbers = f"{row['ms']:8.2f}{row['floor_over_time']:10.3f}{row['host_ms']:9.2f}"
        return f"{numbers}{row['peak_mib']:10.0f}{errors:>20s}"

    columns = f"{'ms':>8s}{'bound/ms':>10s}{'host ms':>9s}{'peak MiB':>10s}{'error of dX, dW':>20s}"
    return _terminal(f"{rows[0]['case']} ({rows[0]['tokens']} tokens)", columns, rows, line)


def terminal_steps_table(rows: list[Row]) -> str:
    """Format one model: time, memory over the weights, loss and norm of the gradient; the tokens
    where they were counted.
    """

    def line(row: Row) -> str:
        if "failure" in row:
            return f"  {row['failure']}"
        numbers = f"{row['loss']:10.4f}{row['gradient_norm']:12.4g}" if "loss" in row else ""
        numbers += f"{row['tokens']:10,d}" if "tokens" in row else ""
        if "ms" not in row:
            return f"  {'wrong':25s}{numbers}"
        return f"{row['ms']:8.1f}{row['host_ms']:9.1f}{row['peak_mib'] / 1024:10.1f}{numbers}"

    columns = f"{'ms':>8s}{'host ms':>9s}{'peak GiB':>10s}{'loss':>10s}{'gradient':>12s}"
    columns += f"{'tokens':>10s}" if any("tokens" in row for row in rows) else ""
    return _terminal(rows[0]["model"], columns, rows, line)


def terminal_layer_kernels_table(rows: list[Row]) -> str:
    """Format one layer: time, bandwidth, its share of a copy's, time to queue a call, errors."""

    def line(row: Row) -> str:
        errors = _percent(row.get("errors", ()))
        if "ms" in row:
            numbers = f"{1000 * row['ms']:8.1f}{row['tb_per_s']:8.2f}{row['share']:8.3f}"
            numbers += f"{1000 * row['host_ms']:9.1f}{errors:>24s}"
        else:
            numbers = "  " + row.get("failure", f"{'wrong':31s}{errors:>24s}")
        return f"{row['direction']:>9s}{numbers}"

    columns = f"{'':9s}{'µs':>8s}{'TB/s':>8s}{'share':>8s}{'host µs':>9s}{'errors':>24s}"
    return _terminal(rows[0]["case"], columns, rows, line)


def terminal_distributed_table(rows: list[Row]) -> str:
    """Format one model under one engine: time, memory, loss, collectives by kind and MiB."""

    def line(row: Row) -> str:
        if "failure" in row:
            return f"  {row['failure']}"
        if row.get("wrong"):
            return f"  wrong: loss {row['loss']:.4f}"
        memory = f"{row['peak_mib'] / 1024:10.2f}{row['held_mib'] / 1024:10.2f}"
        loss = f"{row['loss']:10.4f}" if "loss" in row else f"{'':10s}"
        unfused = "" if row.get("fused", True) else f"  NOT FUSED: {row['reason']}"
        return f"{row['ms']:8.1f}{memory}{loss}  {_collectives(row)}{unfused}"

    columns = f"{'ms':>8s}{'peak GiB':>10s}{'held GiB':>10s}{'loss':>10s}  collectives, MiB"
    return _terminal(rows[0]["model"], columns, rows, line)


def _collectives(row: Row) -> str:
    """Return the calls and MiB of each kind."""
    kinds = dict.fromkeys(each["kind"] for each in row["collectives"])
    of_kind = {k: [each for each in row["collectives"] if each["kind"] == k] for k in kinds}
    return ", ".join(
        f"{sum(e['calls'] for e in found)} {kind} {sum(e['mib'] * e['calls'] for e in found):.3g}"
        for kind, found in of_kind.items()
    )


def _terminal(title: str, columns: str, rows: list[Row], line: Callable[[Row], str]) -> str:
    width = max(24, *(len(row["contender"]) + 1 for row in rows))
    lines = [f"  {row['contender']:{width}s}{line(row)}".rstrip() for row in rows]
    return "\n".join([title, f"  {'':{width}s}{columns}", *lines])


def _percent(errors: Iterable[float]) -> str:
    return ", ".join(f"{error:.3%}" for error in errors)
