"""``agentfly models``: the models that have a name here, where they are, and how to get them."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="The models that have a name here.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model's name, Hugging Face id or directory.")]
