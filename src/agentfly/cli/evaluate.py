"""``agentfly eval``: how an agent does on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly import interruption
from agentfly.errors import ConfigError

if TYPE_CHECKING:
    from agentfly.cli.experiment import Experiment
    from agentfly.events import EventStream
    from agentfly.rollouts.run import RunResult
    from agentfly.task import Task


def evaluate(
    source: Annotated[Path, typer.Argument(metavar="CONFIG.yaml|RUN_DIR", help="A configuration, or a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Fields to override.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of a run: the step to evaluate, or 'none' for the model before training.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask the model at this OpenAI-compatible endpoint.")
    ] = None,
) -> None:
    """Evaluate the model of a configuration, or of a run's last checkpoint, on the held-out tasks."""
    from rich.console import Console

    from agentfly.cli.config_file import save_config
    from agentfly.cli.experiment import Experiment
    from agentfly.cli.source import endpoint_asked, load_source
    from agentfly.cli.train import new_run
    from agentfly.events import EventStream
    from agentfly.trajectory import save_trajectories
    from agentfly.viewing.progress import ConsoleProgress
    from agentfly.viewing.report import metrics_table

    config, step = load_source(source, [*endpoint_asked(base_url), *(overrides or [])], checkpoint)
    experiment = Experiment.of(config)
    if experiment.eval_tasks is None:
        raise ConfigError(f"{source} names no held-out tasks to evaluate on. Set eval_tasks.")
    experiment.fetch_model()
    directory = new_run(config)
    events = EventStream()
    with ConsoleProgress() as progress, events.subscribed(progress):
        result = interruption.run(_evaluated(experiment, experiment.eval_tasks, events))
    path = directory.trajectories_file(step, "eval")
    save_config(config, directory.config_file)
    save_trajectories(result.trajectories, path)
    console = Console()
    console.print(
        metrics_table(result.metrics, f"{len(experiment.eval_tasks)} held-out tasks, {experiment.model_name}")
    )
    console.print(f"trajectories: {path}", soft_wrap=True, highlight=False)


async def _evaluated(experiment: Experiment, tasks: list[Task], events: EventStream) -> RunResult:
    from agentfly.rollouts.run import evaluate as evaluate_agent

    training = experiment.config.training
    async with experiment.runner_settings(events) as settings:
        return await evaluate_agent(
            experiment.agent,
            tasks,
            reward=experiment.reward,
            attempts=training.eval_attempts,
            temperature=training.eval_temperature,
            **settings,
        )
