"""``agentfly train`` and ``agentfly demo``: train the agent of a configuration file, with a report at the end."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core.errors import ConfigError

if TYPE_CHECKING:
    from agentfly.cli.config_file import RunConfig
    from agentfly.core.run_directory import RunDirectory


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG.yaml [key=value]...", help="The configuration, and fields to override."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Resume a run from its last checkpoint; fields to override may follow, such as "
            "training.steps=200 to extend it.",
        ),
    ] = None,
) -> None:
    """Train the agent of a configuration file."""
    from agentfly.cli.command_run import find_resumable_run, warn_unused_overrides
    from agentfly.cli.config_file import load_config

    words = words or []
    if resume is not None:
        run = find_resumable_run(resume, "train")
        warn_unused_overrides(words, "train")
        run_training(load_config(run.config_file, words), resumed=run)
        return
    if not words:
        raise ConfigError(
            "Name a configuration or a run: agentfly train CONFIG.yaml, or agentfly train --resume RUN_DIR."
        )
    warn_unused_overrides(words, "train")
    run_training(load_config(Path(words[0]), words[1:]))


def new_run(config: RunConfig) -> RunDirectory:
    """Create the directory of a new run: the configured one, or one named after the time."""
    from agentfly.core.run_directory import RunDirectory

    if config.run_dir is None:
        return RunDirectory.create()
    path = Path(config.run_dir)
    return RunDirectory.create(path.parent, path.name)


def run_training(config: RunConfig, resumed: RunDirectory | None = None) -> None:
    """Train as configured, with progress on the console and a report at the end.

    Args:
        config: the configuration.
        resumed: the run to resume; None for a new run.
    """
    from rich.console import Console

    from agentfly.cli.command_run import save_config_on_start
    from agentfly.cli.config_file import EndpointConfig, OracleConfig
    from agentfly.cli.experiment import Experiment
    from agentfly.core.events import EventStream
    from agentfly.core.run_directory import RunDirectory
    from agentfly.training.resume import depends_on_steps
    from agentfly.training.train import train as train_agent
    from agentfly.viewing.report import training_report

    if isinstance(config.policy, OracleConfig):
        raise ConfigError(
            "policy: the oracle has nothing to learn. Leave it out, or warm-start a model on what the oracle does: "
            "agentfly rollout CONFIG policy=oracle, then agentfly sft."
        )
    if isinstance(config.policy, EndpointConfig):
        raise ConfigError(
            "policy: an endpoint's weights cannot be trained from here; it is for evaluations and rollouts. Leave it "
            "out, and name a model that learns in this process, with 'policy: vllm' if vLLM is to sample from it."
        )
    experiment = Experiment.load(config)
    tasks = experiment.required_tasks()
    experiment.check_definitions([*tasks, *(experiment.eval_tasks or [])])
    experiment.fetch_model()
    events = EventStream()
    with save_config_on_start(config, resumed, events, command="train"):
        result = train_agent(
            experiment.agent,
            tasks,
            experiment.reward,
            eval_tasks=experiment.eval_tasks,
            curriculum=experiment.curriculum,
            run_dir=config.run_dir if resumed is None else resumed.path,
            resume=resumed is not None,
            progress=True,
            events=events,
            policy=experiment.training_policy(),
            config=config.training,
        )
    console = Console()
    finished = RunDirectory(result.run_dir)
    console.print(training_report(finished, stopped_early=result.stopped_early))
    console.print("\nwhat can be done next", style="bold")
    longer = "" if depends_on_steps(config.training.schedule) else f"training.steps={2 * result.steps}"
    for command in _next_commands(finished, longer, evaluated=experiment.eval_tasks is not None):
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)


def _next_commands(run: RunDirectory, longer: str, *, evaluated: bool) -> list[str]:
    """Return commands that inspect a finished run, and one that extends it by ``longer`` if it can be extended."""
    directory = shlex.quote(str(run.path))
    commands = [f"agentfly compare {directory}", f"agentfly eval {directory}"] if evaluated else []
    commands += [f"agentfly rollout {directory} -n 2", f"agentfly export {directory} --to DIR"]
    commands += [f"agentfly train --resume {directory} {longer}"] if longer else []
    if run.tensorboard.exists():
        commands.append(f"tensorboard --logdir {shlex.quote(str(run.tensorboard))}")
    return commands


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
    from agentfly.tasks.stockroom import ABOUT

    overrides = [f"training.seed={seed}"]
    with as_file(files("agentfly.tasks.stockroom").joinpath(f"{model.value}.yaml")) as path:
        config = load_config(path, overrides)
    if run_dir is not None:
        config = config.model_copy(update={"run_dir": str(run_dir)})
    typer.echo(f"{ABOUT}\n", err=True)
    run_training(config)
