"""``agentfly compare``: the difference between two evaluations of the same tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentfly.core.errors import ConfigError


def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|FILE.jsonl", help="A run, for its last evaluation, or the file of an evaluation."
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_DIR|FILE.jsonl]",
            help="The second evaluation. By default, the run's first and last are compared.",
        ),
    ] = None,
    all_tasks: Annotated[
        bool, typer.Option("--all-tasks", help="Show every task, not only those that differ most.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare two evaluations task by task: the difference with its interval, wins and losses.

    Tasks that only one of them has are excluded and counted. To compare two models, evaluate each with agentfly
    eval, and compare the two runs.
    """
    from rich.console import Console

    from agentfly.core.trajectory import load_trajectories
    from agentfly.evaluation.scores import EvaluationComparison
    from agentfly.viewing.score_tables import comparison_table

    files = _first_and_last(first) if second is None else (_last(first), _last(second))
    comparison = EvaluationComparison.from_trajectories(*map(load_trajectories, files))
    if as_json:
        typer.echo(json.dumps({"files": [str(path) for path in files], **comparison.to_json()}, indent=2))
        return
    console = Console()
    for name, path in zip(("first", "second"), files, strict=True):
        console.print(f"{name}: {path}", soft_wrap=True, highlight=False)
    console.print(comparison_table(comparison, all_tasks=all_tasks))


def _first_and_last(run: Path) -> tuple[Path, Path]:
    files = _evaluations(run)
    if len(files) < 2:
        raise ConfigError(f"{run} has one evaluation. Name another run, or a file, to compare it with.")
    return files[0], files[-1]


def _last(source: Path) -> Path:
    return source if source.is_file() else _evaluations(source)[-1]


def _evaluations(run: Path) -> list[Path]:
    from agentfly.core.run_directory import RunDirectory

    files = [path for _, path in RunDirectory(run).trajectory_files("eval")]
    if not files:
        what = "has no evaluation" if run.is_dir() else "does not exist"
        raise ConfigError(
            f"{run} {what}. Name the directory of a run of agentfly eval or train, or a file of trajectories such as "
            "runs/mine/trajectories/eval-000060.jsonl."
        )
    return files
