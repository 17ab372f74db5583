"""``agentfly rollout``: roll out an agent, show its turns, and save the trajectories."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core import signals

if TYPE_CHECKING:
    from agentfly.cli.command_run import CommandRun
    from agentfly.cli.experiment import Experiment
    from agentfly.core.events import EventStream
    from agentfly.core.run_directory import RunDirectory
    from agentfly.core.task import Task
    from agentfly.policies.policy import SamplingParams
    from agentfly.rollouts.run import RunResult


def rollout(
    source: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml|RUN_DIR", help="A configuration, or a run.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Fields to override.")] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", "-n", min=1, help="Number of tasks, from the first; 4 if not given.")
    ] = None,
    attempts: Annotated[
        int | None, typer.Option("--attempts", "-k", min=1, help="Rollouts of each task; 1 if not given.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of a run: the step to roll out, or 'none' for the model before training.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask the model at this OpenAI-compatible endpoint.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Resume interrupted rollouts; only overrides follow."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the file of the trajectories.")] = False,
) -> None:
    """Roll out an agent on the tasks of its configuration. With a run, its last checkpoint is used.

    The trajectories are shown, and saved as JSON lines as they finish.
    """
    from rich.console import Console

    from agentfly.cli.command_run import CommandRun, base_url_override
    from agentfly.cli.experiment import Experiment
    from agentfly.core.events import EventStream
    from agentfly.viewing.formatting import pluralize
    from agentfly.viewing.progress import ConsoleProgress
    from agentfly.viewing.report import metrics_table
    from agentfly.viewing.trajectory_text import trajectory_panel

    words = [*base_url_override(base_url), *(overrides or [])]
    command = CommandRun.parse("rollout", source, words, checkpoint, resume)
    experiment = Experiment.load(command.config)
    rows = experiment.required_tasks()[: tasks or command.recorded_arguments.get("tasks", 4)]
    attempts = attempts or command.recorded_arguments.get("attempts", 1)
    experiment.check_definitions(rows)
    experiment.fetch_model()
    events = EventStream()
    with ExitStack() as stack:
        directory = stack.enter_context(command.open_directory("rollout"))
        if not quiet:
            stack.enter_context(events.subscribed(stack.enter_context(ConsoleProgress())))
        result = signals.run_until_signal(_roll_out(experiment, events, rows, attempts, command, directory))
    path = directory.trajectories_file(command.step, "rollout")
    if quiet:
        typer.echo(path)
        return
    console = Console()
    for trajectory in result.trajectories:
        console.print(trajectory_panel(trajectory))
    console.print(metrics_table(result.metrics, pluralize(len(result.trajectories), "rollout")))
    console.print(f"trajectories: {path}", soft_wrap=True, highlight=False)


async def _roll_out(
    experiment: Experiment,
    events: EventStream,
    tasks: list[Task],
    attempts: int,
    command: CommandRun,
    directory: RunDirectory,
) -> RunResult:
    from agentfly.rollouts.run import run

    temperature = experiment.config.training.temperature

    def sampling(params: SamplingParams) -> SamplingParams:
        return params if temperature is None else dataclasses.replace(params, temperature=temperature)

    async with experiment.runner_settings(events) as settings:
        return await run(
            experiment.agent,
            tasks,
            reward=experiment.reward,
            attempts=attempts,
            sampling=sampling,
            label="rollout",  # a fixed label, so that equal seeds sample equally
            run_dir=directory,
            resume=command.resumed is not None,
            step=command.step,
            **settings,
        )
