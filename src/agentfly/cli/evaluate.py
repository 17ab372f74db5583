"""``agentfly eval``: how an agent does on held-out tasks."""

from __future__ import annotations

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
) -> None:
    """Evaluate the model of a configuration, or of a run's last checkpoint, on the held-out tasks."""
    from rich.console import Console

    from agentfly.cli.experiment import Experiment
    from agentfly.cli.kept_run import KeptRun
    from agentfly.cli.source import endpoint_asked
    from agentfly.events import EventStream
    from agentfly.viewing.counted import counted
    from agentfly.viewing.progress import ConsoleProgress
    from agentfly.viewing.report import metrics_table

    words = [*endpoint_asked(base_url), *(overrides or [])]
    kept = KeptRun.of("eval", source, words, checkpoint, resume)
    experiment = Experiment.of(kept.config)
    if experiment.eval_tasks is None:
        raise ConfigError(f"{resume or source} names no held-out tasks to evaluate on. Set eval_tasks.")
    experiment.require_definitions(experiment.eval_tasks)
    experiment.fetch_model()
    events = EventStream()
    with kept.directory("eval") as directory, ConsoleProgress() as progress, events.subscribed(progress):
        result = interruption.run(_evaluated(experiment, experiment.eval_tasks, events, kept, directory))
    console = Console()
    console.print(
        metrics_table(
            result.metrics, f"{counted(len(experiment.eval_tasks), 'held-out task')}, {experiment.model_name}"
        )
    )
    path = directory.trajectories_file(kept.step, "eval")
    console.print(f"trajectories: {path}", soft_wrap=True, highlight=False)


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
