"""``agentfly resources``: what runs have started on this machine."""

from __future__ import annotations

import asyncio

import typer

app = typer.Typer(help="Look after what runs have started on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Look after what runs have started on this machine."""


@app.command("reap")
def reap() -> None:
    """Remove what runs that were killed have left behind; what belongs to a live run is left alone."""
    from agentfly.resources.orphans import reap as reap_orphans

    removed = asyncio.run(reap_orphans())
    typer.echo(f"removed {len(removed)} orphans" if removed else "nothing was left behind")
    for entry in removed:
        typer.echo(f"  {entry.kind} {entry.instance}")
