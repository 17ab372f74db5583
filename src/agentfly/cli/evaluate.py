"""``agentfly eval``: how well an agent does on held-out tasks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core import signals
from agentfly.core.errors import ConfigError

if TYPE_CHECKING:
    from agentfly.cli.command_run import CommandRun
    from agentfly.cli.experiment import Experiment
    from agentfly.core.events import EventStream
    from agentfly.core.run_directory import RunDirectory
    from agentfly.core.task import Task
    from agentfly.evaluation.scores import EvaluationScores
    from agentfly.rollouts.run import RunResult


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
        typer.Option(metavar="RUN_DIR", help="Resume an interrupted evaluation; only overrides follow."),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option("-n", "--tasks", min=1, help="Number of held-out tasks; all of them if not given.")
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Show the last stored evaluation of a run, without new rollouts.")
    ] = False,
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

    Shows reward, success, pass@k and pass^k with intervals clustered by task, and each task. training.eval_attempts is
    the number of attempts at a task. The evaluation is stored: --stored shows it again, and agentfly compare compares
    two.
    """
    from agentfly.cli.command_run import CommandRun, base_url_override
    from agentfly.cli.experiment import Experiment
    from agentfly.core.events import EventStream
    from agentfly.core.run_directory import RunDirectory
    from agentfly.core.trajectory import load_trajectories
    from agentfly.evaluation.scores import EvaluationScores
    from agentfly.viewing.formatting import pluralize
    from agentfly.viewing.progress import ConsoleProgress

    words = [*base_url_override(base_url), *(overrides or [])]
    requested = None if ks is None else _parse_ks(ks)
    if stored:
        if source is None or words or resume is not None:
            raise ConfigError(
                "--stored takes the directory of a run, and nothing to override: agentfly eval RUN_DIR --stored."
            )
        step, path = _stored_evaluation(source, checkpoint)
        board = EvaluationScores.from_trajectories(load_trajectories(path))
        title = ", ".join([pluralize(len(board.tasks), "held-out task"), *_whose(RunDirectory(source), step)])
        _show(board, _shown_ks(requested, board), path, title, as_json=as_json, all_tasks=all_tasks)
        return
    command = CommandRun.parse("eval", source, words, checkpoint, resume)
    most = command.config.training.eval_attempts
    if requested is not None and requested[-1] > most:
        raise ConfigError(
            f"--k {ks}: pass@{requested[-1]} needs as many attempts at a task, and training.eval_attempts is {most}. "
            "Raise it, with training.eval_temperature above 0, or lower k."
        )
    experiment = Experiment.load(command.config)
    if experiment.eval_tasks is None:
        raise ConfigError(f"{resume or source} names no held-out tasks to evaluate on. Set eval_tasks.")
    rows = experiment.eval_tasks[: tasks or command.recorded_arguments.get("tasks")]
    experiment.check_definitions(rows)
    experiment.fetch_model()
    events = EventStream()
    with command.open_directory("eval") as directory, ConsoleProgress() as progress, events.subscribed(progress):
        result = signals.run_until_signal(_evaluate(experiment, rows, events, command, directory))
    board = EvaluationScores.from_trajectories(result.trajectories)
    path = directory.trajectories_file(command.step, "eval")
    title = f"{pluralize(len(rows), 'held-out task')}, {experiment.model_name}"
    _show(board, _shown_ks(requested, board), path, title, as_json=as_json, all_tasks=all_tasks, metrics=result.metrics)


def _whose(run: RunDirectory, step: int) -> list[str]:
    """Describe the model of a stored evaluation: from the run's configuration, and how far it was trained."""
    from agentfly.cli.config_file import load_config
    from agentfly.cli.experiment import model_name

    config = load_config(run.config_file) if run.config_file.is_file() else None
    parts = [] if config is None else [model_name(config) or f"the model of {config.agent}"]
    if not step:
        return [*parts, "before training"] if run.metrics_file.exists() else parts
    return [*parts, f"after step {step}"]


def _shown_ks(requested: list[int] | None, board: EvaluationScores) -> list[int]:
    from agentfly.evaluation.scores import default_ks

    return requested or default_ks(board.max_attempts)


def _show(
    board: EvaluationScores,
    ks: list[int],
    path: Path,
    title: str,
    *,
    as_json: bool,
    all_tasks: bool,
    metrics: dict[str, float] | None = None,
) -> None:
    """Print the scores of an evaluation and its metrics, computed from its trajectories if not given."""
    from rich.console import Console

    from agentfly.core.trajectory import load_trajectories
    from agentfly.rollouts.metrics import summarize
    from agentfly.viewing.report import metrics_table
    from agentfly.viewing.score_tables import scores_table

    if as_json:
        typer.echo(json.dumps({"trajectories": str(path), **board.to_json(ks)}, indent=2))
        return
    console = Console()
    console.print(metrics_table(summarize(list(load_trajectories(path))) if metrics is None else metrics, title))
    console.print(scores_table(board, ks, all_tasks=all_tasks))
    console.print(f"trajectories: {path}", soft_wrap=True, highlight=False)


def _stored_evaluation(source: Path, checkpoint: str | None) -> tuple[int, Path]:
    """Return the step and file of an evaluation in a run: the last one, or the one of a step.

    Raises:
        ConfigError: there is no such evaluation.
    """
    from agentfly.core.run_directory import RunDirectory, whole_number

    files = dict(RunDirectory(source).trajectory_files("eval"))
    if not files:
        raise ConfigError(f"{source} has no evaluation. To evaluate it: agentfly eval {shlex.quote(str(source))}")
    if checkpoint is None:
        return max(files), files[max(files)]
    step = 0 if checkpoint == "none" else whole_number(checkpoint)
    if step is None or step not in files:
        raise ConfigError(
            f"{source} has no evaluation after step {checkpoint}. It has evaluations after "
            f"{', '.join(map(str, files))}."
        )
    return step, files[step]


def _parse_ks(ks: str) -> list[int]:
    from agentfly.core.run_directory import whole_number

    numbers = [whole_number(word.strip()) for word in ks.split(",")]
    if not all(numbers):
        raise ConfigError(f"--k {ks}: it must be whole numbers of at least 1, for instance --k 1,4,8.")
    return sorted({number for number in numbers if number})


async def _evaluate(
    experiment: Experiment, tasks: list[Task], events: EventStream, command: CommandRun, directory: RunDirectory
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
            label="eval",  # a fixed label, so that equal seeds sample equally
            run_dir=directory,
            resume=command.resumed is not None,
            step=command.step,
            **settings,
        )
