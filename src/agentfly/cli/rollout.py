"""``agentfly rollout``: roll an agent out, show what it did, and keep the trajectories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly import interruption

if TYPE_CHECKING:
    from agentfly.cli.experiment import Experiment
    from agentfly.events import EventStream
    from agentfly.policies.policy import SamplingParams
    from agentfly.rollouts.run import RunResult


def rollout(
    source: Annotated[Path, typer.Argument(metavar="CONFIG.yaml|RUN_DIR", help="A configuration, or a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Fields to override.")] = None,
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=1, help="Number of tasks, from the first.")] = 4,
    attempts: Annotated[int, typer.Option("--attempts", "-k", min=1, help="Rollouts of each task.")] = 1,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of a run: the step to roll out, or 'none' for the model before training.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask the model at this OpenAI-compatible endpoint.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show the trajectories.")] = False,
) -> None:
    """Roll out the agent of a configuration, or of a run's last checkpoint, on its tasks.

    The trajectories are shown, and saved as JSON lines.
    """
    from rich.console import Console

    from agentfly.cli.config_file import save_config
    from agentfly.cli.experiment import Experiment
    from agentfly.cli.source import endpoint_asked, load_source
    from agentfly.cli.train import new_run
    from agentfly.events import EventStream
    from agentfly.trajectory import save_trajectories
    from agentfly.viewing.progress import ConsoleProgress
    from agentfly.viewing.report import metrics_table
    from agentfly.viewing.trajectory_text import trajectory_panel

    config, step = load_source(source, [*endpoint_asked(base_url), *(overrides or [])], checkpoint)
    experiment = Experiment.of(config)
    experiment.fetch_model()
    directory = new_run(config)
    events = EventStream()
    with ConsoleProgress() as progress, events.subscribed(progress):
        result = interruption.run(_rolled_out(experiment, events, tasks, attempts))
    path = directory.trajectories_file(step, "rollout")
    save_config(config, directory.config_file)
    save_trajectories(result.trajectories, path)
    console = Console()
    if not quiet:
        for trajectory in result.trajectories:
            console.print(trajectory_panel(trajectory))
    console.print(metrics_table(result.metrics, f"{len(result.trajectories)} rollouts"))
    console.print(f"trajectories: {path}", soft_wrap=True, highlight=False)


async def _rolled_out(experiment: Experiment, events: EventStream, tasks: int, attempts: int) -> RunResult:
    from agentfly.rollouts.run import run

    temperature = experiment.config.training.temperature

    def sampling(params: SamplingParams) -> SamplingParams:
        return params if temperature is None else dataclasses.replace(params, temperature=temperature)

    async with experiment.runner_settings(events) as settings:
        return await run(
            experiment.agent,
            experiment.tasks[:tasks],
            reward=experiment.reward,
            attempts=attempts,
            sampling=sampling,
            label="rollout",  # named alike, rollouts of one seed sample alike
            **settings,
        )
