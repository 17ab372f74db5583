"""``python -m benchmarks.training``: training throughput and memory, against trl on the same work."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from agentfly.cli.main import run_function
from benchmarks.training.measure import render, run_training_bench
from benchmarks.training.workload import TrainingWorkload


def training(
    model: Annotated[
        str, typer.Option(help="The model: a shipped name, a Hugging Face id, or a directory.")
    ] = "smollm2-135m",
    trl: Annotated[
        str | None,
        typer.Option(
            help="Compare with trl's GRPOTrainer: an interpreter or a virtual environment that has trl.", metavar="DIR"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format of the weights: float32 or bfloat16.")] = "float32",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Both sides compute activations twice, to save memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure sampled tokens per second of whole training steps, and peak memory, against trl on the same work.

    A step samples 2 prompts 4 times each, 32 tokens, and makes one update. Rollouts of three turns are measured too.
    """
    work = TrainingWorkload(dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    result = run_training_bench(model, work, trl=trl)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        Console().print(render(result))


if __name__ == "__main__":
    run_function(training)
