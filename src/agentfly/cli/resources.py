"""``agentfly resources``: what runs have started on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentfly import interruption

app = typer.Typer(help="Look after what runs have started on this machine.", no_args_is_help=True)

WIDE = 10_000
"""Columns where the output is read by a program: each instance is one line there, however long its name."""

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", metavar="DIR", help="Where runs write down what they start, if not in the usual place."
    ),
]


@app.command("ps")
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show what the live runs of this user have: pools, instances, who has them and who waits."""
    from rich.console import Console

    from agentfly.resources.live_runs import find_runs
    from agentfly.viewing.live_runs import live_runs_view

    runs = interruption.run(find_runs(state_dir))
    if as_json:
        typer.echo(json.dumps({"runs": [run.to_json() for run in runs]}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else WIDE).print(live_runs_view(runs))


@app.command("reap")
def reap(state_dir: StateDir = None) -> None:
    """Remove what runs that were killed have left behind; what belongs to a live run is left alone."""
    from agentfly.resources.live_runs import find_runs
    from agentfly.resources.orphans import reap as reap_orphans
    from agentfly.viewing.counted import counted

    removed = interruption.run(reap_orphans(state_dir, repeat=True))
    left = sum(len(run.started) for run in interruption.run(find_runs(state_dir)) if run.dead)
    if removed or left:
        typer.echo(f"removed {counted(len(removed), 'orphan')}{f', {left} could not be removed' if left else ''}")
    else:
        typer.echo("nothing was left behind")
    for entry in removed:
        typer.echo(f"  {entry.kind} {entry.instance}")
