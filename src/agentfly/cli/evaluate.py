"""``agentfly eval``: how an agent does on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly import interruption
from agentfly.errors import ConfigError

if TYPE_CHECKING:
    from agentfly.cli.experiment import Experiment
    from agentfly.cli.kept_run import KeptRun
    from agentfly.events import EventStream
    from agentfly.rollouts.run import RunResult
    from agentfly.run_directory import RunDirectory
    from agentfly.task import Task


def evaluate(
    source: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml|RUN_DIR", help="A configuration, or a run.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Fields to override.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of a run: the step to evaluate, or 'none' for the model before training.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask the model at this OpenAI-compatible endpoint.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on with an evaluation that was cut short; only overrides follow."),
    ] = None,
    ks: Annotated[
        str | None,
        typer.Option("--k", metavar="K,…", help="The k of pass@k; 1, 2, 4, … up to the attempts if not given."),
    ] = None,
    all_tasks: Annotated[
        bool, typer.Option("--all-tasks", help="Show every task, not only those solved least.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Evaluate the model of a configuration, or of a run's last checkpoint, on the held-out tasks.

    Shows reward, success and pass@k with intervals clustered by task, and each task. training.eval_attempts is the
    number of attempts at a task. What is kept can be set beside another evaluation: agentfly compare.
    """
    from rich.console import Console

    from agentfly.cli.experiment import Experiment
    from agentfly.cli.kept_run import KeptRun
    from agentfly.cli.source import endpoint_asked
    from agentfly.events import EventStream
    from agentfly.rollouts.scoreboard import Scoreboard, usual_ks
    from agentfly.viewing.counted import counted
    from agentfly.viewing.progress import ConsoleProgress
    from agentfly.viewing.report import metrics_table
    from agentfly.viewing.score_tables import scores_table

    words = [*endpoint_asked(base_url), *(overrides or [])]
    wanted = None if ks is None else _numbers(ks)
    kept = KeptRun.of("eval", source, words, checkpoint, resume)
    most = kept.config.training.eval_attempts
    if wanted is not None and wanted[-1] > most:
        raise ConfigError(
            f"--k {ks}: pass@{wanted[-1]} needs as many attempts at a task, and training.eval_attempts is {most}. "
            "Raise it, with training.eval_temperature above 0, or lower k."
        )
    experiment = Experiment.of(kept.config)
    if experiment.eval_tasks is None:
        raise ConfigError(f"{resume or source} names no held-out tasks to evaluate on. Set eval_tasks.")
    experiment.require_definitions(experiment.eval_tasks)
    experiment.fetch_model()
    events = EventStream()
    with kept.directory("eval") as directory, ConsoleProgress() as progress, events.subscribed(progress):
        result = interruption.run(_evaluated(experiment, experiment.eval_tasks, events, kept, directory))
    board = Scoreboard.of(result.trajectories)
    ks_told = wanted or usual_ks(board.most_attempts)
    path = directory.trajectories_file(kept.step, "eval")
    if as_json:
        typer.echo(json.dumps({"trajectories": str(path), **board.to_json(ks_told)}, indent=2))
        return
    console = Console()
    title = f"{counted(len(experiment.eval_tasks), 'held-out task')}, {experiment.model_name}"
    console.print(metrics_table(result.metrics, title))
    console.print(scores_table(board, ks_told, all_tasks=all_tasks))
    console.print(f"trajectories: {path}", soft_wrap=True, highlight=False)


def _numbers(ks: str) -> list[int]:
    words = [word.strip() for word in ks.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--k {ks}: it must be whole numbers of at least 1, for instance --k 1,4,8.")
    return sorted({int(word) for word in words})


async def _evaluated(
    experiment: Experiment, tasks: list[Task], events: EventStream, kept: KeptRun, directory: RunDirectory
) -> RunResult:
    from agentfly.rollouts.run import evaluate as evaluate_agent

    training = experiment.config.training
    async with experiment.runner_settings(events) as settings:
        return await evaluate_agent(
            experiment.agent,
            tasks,
            reward=experiment.reward,
            attempts=training.eval_attempts,
            temperature=training.eval_temperature,
            label="eval",  # named alike, rollouts of one seed sample alike
            run_dir=directory,
            resume=kept.resumed is not None,
            step=kept.step,
            **settings,
        )
