"""``agentfly init``: a small project that trains as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the project goes; it is called so.")],
) -> None:
    """Begin a project: a task with its tool, reward, configuration and tests, which trains as it stands."""
    from agentfly.cli.project import new_project

    written = new_project(directory)
    typer.echo(f"{directory}: {', '.join(path.name for path in written)}")
    typer.echo("\nwhat can be done next")
    if directory.absolute() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(directory))}")
    for command in ("agentfly check config.yaml", "agentfly train config.yaml", "pytest"):
        typer.echo(f"  {command}")
