"""``agentfly sft``: warm-start a configuration's model on successful trajectories."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from agentfly.training.sft.trainer import SFTResult


def sft(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG.yaml RUN_DIR|FILE.jsonl... [key=value]...",
            help="The configuration, the training data, and fields to override.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Resume an interrupted warm start, without CONFIG.yaml."),
    ] = None,
) -> None:
    """Train the model of a configuration on successful trajectories (supervised), its own or another model's.

    Only trajectories with a reward of at least sft.min_reward are used. Sampled ids are used as they are. Conversations
    of an oracle or another model are rendered in this model's chat format. The loss covers only the agent's turns.
    """
    from agentfly.cli.command_run import find_resumable_run, save_config_on_start, warn_unused_overrides
    from agentfly.cli.config_file import is_override, load_config
    from agentfly.cli.experiment import Experiment
    from agentfly.core.events import EventStream
    from agentfly.training.sft.sft import sft as warm_start

    words = words or []
    resumed = None if resume is None else find_resumable_run(resume, "sft")
    source = resumed.config_file if resumed is not None else Path(words.pop(0)) if words else None
    overrides = [word for word in words if is_override(word)]
    data = [word for word in words if not is_override(word)]
    if resumed is not None and not data:
        raise ConfigError(
            f"Name the trajectories that {resume} was started with: agentfly sft --resume {resume} RUN_DIR, where "
            "RUN_DIR contains them."
        )
    if source is None or not data:
        raise ConfigError(
            "Name a configuration and trajectories: agentfly sft CONFIG.yaml RUN_DIR. RUN_DIR contains trajectories, "
            "for instance from agentfly rollout CONFIG.yaml policy=oracle. To continue: agentfly sft --resume RUN "
            "RUN_DIR."
        )
    warn_unused_overrides(overrides, "sft")
    config = load_config(source, overrides)
    experiment = Experiment.load(config)
    experiment.fetch_model()
    events = EventStream()
    with save_config_on_start(config, resumed, events, command="sft", sources=shlex.join(data)):
        result = warm_start(
            experiment.agent,
            data,
            run_dir=config.run_dir if resume is None else resume,
            resume=resume is not None,
            events=events,
            **config.sft.model_dump(),
        )
    _report(result, evaluated=experiment.eval_tasks is not None)


def _report(result: SFTResult, *, evaluated: bool) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(result))
    console.print(f"model: {result.checkpoint}", soft_wrap=True, highlight=False)
    console.print("\nwhat can be done next", style="bold")
    directory, model = shlex.quote(str(result.run_dir)), shlex.quote(str(result.checkpoint))
    evaluation = [f"agentfly eval {directory}"] if evaluated else []
    for command in [*evaluation, f"agentfly train CONFIG.yaml model={model}", f"agentfly export {directory} --to DIR"]:
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)


def _table(result: SFTResult) -> Table:
    from rich.table import Table

    examples = result.examples
    table = Table(title="warm start", title_justify="left", show_header=False)
    rows: list[tuple[str, str]] = [
        ("trajectories learned from, by their own ids", str(examples.sampled)),
        ("trajectories learned from, rendered for this model", str(examples.rendered)),
        *((f"excluded: {cause.replace('_', ' ')}", str(count)) for cause, count in sorted(examples.excluded.items())),
        ("rows learned", str(len(examples.rows))),
        ("rows held out", str(len(examples.held_out))),
        ("updates", str(result.updates)),
    ]
    if result.losses:
        steps = sorted(result.losses)
        rows.append(("loss, nats a token", f"{result.losses[steps[0]]:.4f} → {result.losses[steps[-1]]:.4f}"))
    if result.held_out:
        steps = sorted(result.held_out)
        rows.append(("held-out loss", f"{result.held_out[steps[0]]:.4f} → {result.held_out[steps[-1]]:.4f}"))
    for row in rows:
        table.add_row(*row)
    return table
