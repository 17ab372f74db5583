"""``agentfly resources``: the resources that runs have started on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentfly.core import signals

app = typer.Typer(help="Show or remove resources that runs have started on this machine.", no_args_is_help=True)

PIPE_WIDTH = 10_000
"""Columns of output that a program reads: one line per instance, however long its name."""

StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="DIR", help="The directory of the ledgers, if it is not the default."),
]


@app.command("ps")
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show the resources of this user's live runs: pools, instances, owners and waiting requests."""
    from rich.console import Console

    from agentfly.resources.engine.live_runs import find_runs
    from agentfly.viewing.resource_tables import resource_tables

    runs = signals.run_until_signal(find_runs(state_dir))
    if as_json:
        typer.echo(json.dumps({"runs": [run.to_json() for run in runs]}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(resource_tables(runs))


@app.command("reap")
def reap(state_dir: StateDir = None) -> None:
    """Remove the resources of killed runs. Resources of live runs stay."""
    from agentfly.resources.engine.live_runs import find_runs
    from agentfly.resources.engine.orphans import reap_orphans
    from agentfly.viewing.formatting import pluralize

    removed = signals.run_until_signal(reap_orphans(state_dir, repeat=True))
    left = sum(len(run.started) for run in signals.run_until_signal(find_runs(state_dir)) if run.dead)
    if removed or left:
        typer.echo(f"removed {pluralize(len(removed), 'orphan')}{f', {left} could not be removed' if left else ''}")
    else:
        typer.echo("nothing was left behind")
    for entry in removed:
        typer.echo(f"  {entry.kind} {entry.instance}")
