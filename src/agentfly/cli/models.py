"""``agentfly models`` and ``agentfly export``: models of the catalog, and a run's model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentfly.core.errors import PrerequisiteError

app = typer.Typer(help="List, download and find the models of the catalog.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model's name, Hugging Face id or directory.")]


@app.command("list")
def list_all() -> None:
    """List the models of the catalog and their directories."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentfly.policies.catalog import list_models

    table = Table.grid(padding=(0, 2))
    for model in list_models():
        about = Text(f"{model.summary}\n{model.parameters:,} parameters, {model.licence}\n", overflow="fold")
        about.append(str(model.path) if model.path else f"not downloaded: agentfly models get {model.name}", "dim")
        table.add_row(Text(model.name, style="bold"), about)
    Console().print(table)


@app.command("get")
def get(name: Name) -> None:
    """Download a model unless it is on this machine, and print its directory."""
    from agentfly.policies.catalog import resolve_model

    typer.echo(resolve_model(name, report=lambda line: typer.echo(line, err=True)))


@app.command("path")
def path(name: Name) -> None:
    """Print the directory of a model that is on this machine."""
    from agentfly.policies.catalog import list_models, resolve_model

    for model in list_models():
        if model.name == name and model.path is None:
            raise PrerequisiteError(
                f"The model {name} is not on this machine. To download it: agentfly models get {name}."
            )
    typer.echo(resolve_model(name))


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run, or one of its checkpoints.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The directory to write; it must be new or empty.")],
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", help="Of a run: the step to export; the last if not given.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapter, in peft's format.")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Number format of the weights; auto keeps the format of the checkpoint."),
    ] = "auto",
) -> None:
    """Write the model of a run for other programs: weights with adapters merged, tokenizer and chat template.

    The written model is loaded and compared with the checkpoint before the directory appears.
    """
    from agentfly.core.installation import require_training_packages

    require_training_packages()
    from agentfly.training.export import export as export_model

    done = export_model(source, to, step=checkpoint, adapter=adapter, dtype=dtype)
    what = f"adapter for {done.base}" if done.adapter else "model"
    typer.echo(f"{what}: {done.path}")
    typer.echo(f"exported from {done.source}; log-probs of a test sequence differ by at most {done.difference:.2g}")
