"""``agentfly demo``: an agent learns before the user's eyes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DemoModel(StrEnum):
    """The models that the demo can train."""

    TINY = "tiny"
    SMOLLM2 = "smollm2-135m"


def demo(
    model: Annotated[DemoModel, typer.Option(help="The model to train.")] = DemoModel.TINY,
    seed: Annotated[int, typer.Option(min=0, help="Fixes the order of the tasks and what the model samples.")] = 1,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; runs/<time> if not given.")
    ] = None,
) -> None:
    """Train an agent in a sandbox, in some minutes on a processor, and show what it learned."""
    from importlib.resources import as_file, files

    from agentfly.cli.config_file import load_config
    from agentfly.cli.train import run_training
    from agentfly.tasks.stockroom import ABOUT

    overrides = [f"training.seed={seed}"]
    with as_file(files("agentfly.tasks.stockroom").joinpath(f"{model.value}.yaml")) as path:
        config = load_config(path, overrides)
    if run_dir is not None:
        config = config.model_copy(update={"run_dir": str(run_dir)})
    typer.echo(f"{ABOUT}\n", err=True)
    run_training(config)
