"""``agentfly models``: the models that have a name here, where they are, and how to get them."""

from __future__ import annotations

from typing import Annotated

import typer

from agentfly.errors import PrerequisiteError

app = typer.Typer(help="The models that have a name here.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model's name, Hugging Face id or directory.")]


@app.command("list")
def list_all() -> None:
    """List the models that have a name here, and where they are."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentfly.policies.catalog import list_models

    table = Table.grid(padding=(0, 2))
    for model in list_models():
        about = Text(f"{model.summary}\n{model.parameters:,} parameters, {model.licence}\n", overflow="fold")
        about.append(str(model.path) if model.path else f"not here yet: agentfly models get {model.name}", "dim")
        table.add_row(Text(model.name, style="bold"), about)
    Console().print(table)


@app.command("get")
def get(name: Name) -> None:
    """Fetch a model if it is not here yet, and print its directory."""
    from agentfly.policies.catalog import find_model

    typer.echo(find_model(name, report=lambda line: typer.echo(line, err=True)))


@app.command("path")
def path(name: Name) -> None:
    """Print the directory of a model that is here."""
    from agentfly.policies.catalog import find_model, list_models

    for model in list_models():
        if model.name == name and model.path is None:
            raise PrerequisiteError(f"The model {name} is not here yet. To fetch it: agentfly models get {name}.")
    typer.echo(find_model(name))
