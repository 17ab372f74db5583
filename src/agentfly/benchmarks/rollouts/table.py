"""The measurements of rollouts as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

_HEADINGS = ("", "rollouts", "turns", "best s", "bare s", "measured", "efficiency", "target", "CPU ms", "calls")


def render(result: dict[str, Any]) -> Group:
    """The workloads, a row each, with another one for sync tools, and the memory below."""
    table = Table(title="Rollouts: best possible time / measured time", pad_edge=False, padding=(0, 1, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in result["workloads"]:
        table.add_row(row["workload"], *_columns(row))
        if sync := row.get("with_sync_tools"):
            table.add_row(f"{row['workload']} sync", *_columns(sync))
    points = ", ".join(
        f"{row['workload']} {row['sync_points']:+.1f}" for row in result["workloads"] if "sync_points" in row
    )
    points = points or "(not measured)"
    return Group(
        table,
        "Bare is the same waits in asyncio alone; calls are those of the model, over those that are needed.",
        f"Sync is the same work with sync functions as tools, measured in turns. Async tools are faster by {points} "
        f"points of efficiency (target at most {result['max_sync_points']:g}).",
        f"CPU is a turn's: target below {result['max_cpu_ms_per_turn']} ms beside the tokenizer, every event recorded.",
        f"Memory of a running rollout beside its tokens: {result['kb_per_rollout']:.1f} kB "
        f"(target below {result['max_kb_per_rollout']} kB).",
    )


def _columns(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["rollouts"]),
        str(row["turns"]),
        f"{row['best_seconds']:.3f}",
        f"{row['bare_seconds']:.3f}",
        f"{row['measured_seconds']:.3f}",
        f"{row['efficiency']:.1%}",
        f"{row['target']:.0%}",
        f"{row['cpu_ms_per_turn']:.2f}",
        f"{row['model_calls'] / row['needed_model_calls']:.0%}",
    )
